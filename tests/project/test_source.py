"""Calls that the source must not have, found by syntax: SECURITY.md and timers rely on it."""

import ast
from pathlib import Path

import epdd

FOLDER = Path(epdd.__file__).parent
TREES = {path.relative_to(FOLDER): ast.parse(path.read_text()) for path in FOLDER.rglob("*.py")}
# Modules that execute their input, and such functions of other modules.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "marshal", "shelve", "joblib", "cloudpickle", "multiprocessing"}
LOADERS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("torch.jit", "load"), ("torch.hub", "load")}
# Time of day: for people and clients, never for a timer.
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
WALL_USED = {
    Path("daemon.py"): 1,                   # when the daemon began, in the model list
    Path("frontend/api/completions.py"): 1,     # "created" of an answer
    Path("ops/request_log.py"): 1,     # the request log's lines
    Path("checkpoint/chat_template.py"): 1,  # strftime_now of chat templates
}


def calls(tree):
    """(module or object, name) of every dotted call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.func.attr


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_nothing_is_unpickled_but_the_spawn_message():
    for path, tree in TREES.items():
        assert not UNPICKLERS & set(imported(tree)), path
        assert not LOADERS & set(calls(tree)), path
        # multiprocess pickles what it is given: the spawn message, in one file.
        assert ("multiprocess" in set(imported(tree))) == (path == Path("fleet/process.py")), path


def test_nothing_that_was_read_is_run():
    for path, tree in TREES.items():
        bare = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not bare & {"eval", "exec", "compile", "__import__"}, path
        assert not {(owner, name) for owner, name in calls(tree)
                    if owner == "os" and name in ("system", "popen") or owner == "subprocess"}, path
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, path


def test_no_timer_looks_at_the_time_of_day():
    found = {path: count for path, tree in TREES.items()
             if (count := sum((owner.rpartition(".")[2], name) in WALL for owner, name in calls(tree)))}
    assert found == WALL_USED
    for path, tree in TREES.items():
        assert not {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "time"
                    for alias in node.names} & {"time", "time_ns"}, path

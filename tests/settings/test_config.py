import re
import tomllib
from pathlib import Path

import pytest
from msgspec import structs

from epdd.errors import ConfigError
from epdd.settings import config
from epdd.settings.config import SECTIONS, Config
from epdd.settings.paths import runtime_dir
from epdd.settings.renamed import RENAMED
from epdd.settings.values import bare
from epdd.settings.worker_overrides import WorkerCount, WorkerOverride, count
from epdd.settings.workers import POLICIES, RouterSettings

REFERENCE = Path(__file__).parents[2] / "etc" / "epdd.toml"
SETTING = re.compile(r"^#(?=[a-z_]+ = )", re.MULTILINE)


@pytest.fixture
def no_system_file(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "SYSTEM_FILE", tmp_path / "none.toml")


def load(*argv, **environ):
    return config.load(argv, environ)[0]


def test_reference_file_as_shipped_changes_nothing():
    assert config.from_file(Config(), REFERENCE) == Config()


def test_reference_file_shows_every_setting_at_its_default(tmp_path):
    bare = tmp_path / "bare.toml"
    bare.write_text(SETTING.sub("", REFERENCE.read_text()))
    assert config.from_file(Config(), bare) == Config()
    tables = tomllib.loads(bare.read_text())
    assert {name: set(table) for name, table in tables.items()} == {
        name: set(section.__struct_fields__) for name, section in SECTIONS.items()}


def test_later_sources_win(no_system_file, tmp_path):
    file = tmp_path / "epdd.toml"
    file.write_text("[server]\nport = 1\nhost = 'a'\nmax_requests = 7\ntimeout_s = 5\n[media]\nallow = ['x', 'y:80']\n")
    found = load("--config", str(file), "--port", "3", "--set", "server.timeout_s=9.5", "--model", "/m",
                 EPDD_SERVER_PORT="2", EPDD_SERVER_HOST="b", EPDD_LOG_LEVEL="debug", EPDD_OTHER="x", PATH="/bin")
    assert (found.server.max_requests, found.server.host, found.server.port, found.server.timeout_s) == (7, "b", 3, 9.5)
    assert (found.media.allow, found.log.level, found.model.path) == (("x", "y:80"), "debug", "/m")


def test_system_file_is_read_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "SYSTEM_FILE", tmp_path / "epdd.toml")
    assert load() == Config()
    (tmp_path / "epdd.toml").write_text("[log]\nlevel = 'error'\n")
    assert load().log.level == "error"


def test_texts_become_values(no_system_file):
    found = load("--set", "admin.mode=0o660", "--set", "media.allow= a , b,", "--set", "router.ratio=6",
                 "--set", "server.strict=True", EPDD_MODEL_ALIASES="x,y")
    assert (found.admin.mode, found.media.allow, found.router.ratio) == (0o660, ("a", "b"), 6.0)
    assert (found.server.strict, found.model.aliases) == (True, ("x", "y"))


@pytest.mark.parametrize("text, found", [
    ("auto", WorkerCount()), ("0", WorkerCount()), (3, WorkerCount(3)),
    ("gpu:1,cpu:4", WorkerCount(5, (1, 4))), (" cpu:2 ", WorkerCount(2, (0, 2))),
    ("cpu:0, gpu:4", WorkerCount(4, (4, 0)))])
def test_how_many_workers(text, found):
    workers = Config().with_values("encoder", {"workers": text}, "test").encoder.workers
    assert count(workers) == found


def test_workers_one_by_one(tmp_path):
    """The example of the reference file, and both ways to write CPUs."""
    example = re.search(r"^# \[\[worker\]\](?:\n# .*)+", REFERENCE.read_text(), re.MULTILINE)[0]
    file = tmp_path / "epdd.toml"
    file.write_text(re.sub(r"^# (.*?)( +\(.*)?$", r"\1", example, flags=re.MULTILINE)
                    + "\n[[worker]]\nrole = 'pd'\ncpus = [4, 2]\n")
    assert load("--config", str(file)).worker == (
        WorkerOverride("encoder", "gpu:1", (*range(16), 32), numa_node=0, threads=8), WorkerOverride("pd", cpus=(2, 4)))


@pytest.mark.parametrize("toml, words", [
    ("[server]\nprot = 1", "unknown setting server.prot"), ("[sever]\nport = 1", "unknown section [sever]"),
    ("server = 1", "server must be a table"), ("[server]\nport = 'x'", "server.port is 'x'; a whole number expected"),
    ("[server]\nport = true", "server.port is True; a whole number expected"),
    ("[server]\nport = 1.5", "server.port is 1.5; a whole number expected"),
    ("[model]\npath = 1", "model.path is 1; text expected"),
    ("[media]\nallow = [1]", "media.allow is [1]; "), ("[server", "epdd.toml: "),
    ("[server]\nstrict = 1", "server.strict is 1; true or false expected"),
    ("[server]\ncors_origins = ['https://a.example/']", "server.cors_origins has 'https://a.example/'; expected"),
    ("[server]\napi_keys = ['sk-1', 5]", "server.api_keys is ...; a list of texts expected"),
    ("[server]\nport = 70000", "server.port is 70000; at most 65535"),
    ("[router]\npolicy = 'x'", "router.policy is 'x'; allowed: budget, earliest"),
    ("[pd]\nthreads = -1", "pd.threads is -1; it must not be negative"),
    ("[pd]\nworkers = 'gpu'", """pd.workers is 'gpu'; expected: "auto", a number, or like "gpu:1,cpu:4\""""),
    ("[encoder]\nworkers = 'gpu:1,gpu:2'", "encoder.workers is 'gpu:1,gpu:2'; expected"),
    ("[encoder]\nworkers = 'gpu:0'", "encoder.workers is 'gpu:0'; expected"),
    ("[encoder]\nworkers = -1", "encoder.workers is '-1'; expected"),
    ("[encoder]\nworkers = true", "encoder.workers is True; a number or text expected"),
    ("[worker]\nrole = 'pd'", "worker must be [[worker]] tables"), ("worker = [1]", "[[worker]] 0 must be a table"),
    ("[[worker]]\nrole = 'pd'\n[[worker]]\ncpus = '1'", "[[worker]] 1: role is None; allowed: encoder, pd"),
    ("[[worker]]\nrole = 'pd'\ncpu = '1'", "[[worker]] 0: unknown setting cpu"),
    ("[[worker]]\nrole = 'pd'\ndevice = 'cuda:0'", "device is 'cuda:0'; expected: \"cpu\" or like \"gpu:0\""),
    ("[[worker]]\nrole = 'pd'\ncpus = '3-1'", "cpus is '3-1'; expected: like \"0-3,8\""),
    ("[[worker]]\nrole = 'pd'\ncpus = '0-99999'", "cpus is '0-99999'; expected"),
    ("[[worker]]\nrole = 'pd'\ncpus = 3", "cpus is 3; expected"), ("[[worker]]\nrole = 'pd'\nthreads = -1", "threads"),
    ("[[worker]]\nrole = 'pd'\nnuma_node = true", "numa_node is True; a whole number expected"),
    ("[pd]\nworkers = 2\n[[worker]]\nrole = 'pd'", "pd.workers is '2', and [[worker]] tables list the pd workers"),
    ("[pd]\nmax_sequences = 0", "pd.max_sequences is 0; at least 1"),
    ("[arena]\ngpu_bytes = -2", "arena.gpu_bytes is -2; at least -1"),
    ("[admin]\nmode = 0o1777", "admin.mode is 0o1777; at most 0o777"),
    ("[media]\ntimeout_s = inf", "media.timeout_s is inf; at most 1000000000"),
    ("[media]\ntimeout_s = nan", "media.timeout_s is nan; a number expected"),
    ("[model]\ndtype = 16", "model.dtype is 16; text expected"),
    ("[server]\nmax_request = 1", "unknown setting server.max_request; did you mean max_requests?"),
    ("[[worker]]\nrole = 'pd'\nthread = 1", "[[worker]] 0: unknown setting thread; did you mean threads?")])
def test_bad_files_name_the_field(tmp_path, toml, words):
    file = tmp_path / "epdd.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load("--config", str(file))


@pytest.mark.parametrize("argv, environ, words", [
    (["--config", "/nowhere.toml"], {}, "/nowhere.toml: No such file"),
    (["--set", "server.port=x"], {}, "--set: server.port is 'x'"), (["--set", "port=1"], {}, "--set: unknown section"),
    (["--port", "x"], {}, "--port: server.port is 'x'"), (["--wrong"], {}, "unknown option --wrong"),
    ([], {"EPDD_SERVER_PORT": "x"}, "environment: server.port is 'x'"),
    ([], {"EPDD_SERVER_PROT": "1"}, "environment: unknown setting server.prot")])
def test_bad_arguments_and_environment_name_the_field(no_system_file, argv, environ, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(*argv, **environ)


def given(tmp_path, source, **settings):
    """Arguments and environment that set `section__key` in a file, the environment or --set."""
    names = {name.replace("__", "."): value for name, value in settings.items()}
    if source == "file":
        file = tmp_path / "epdd.toml"
        tables = {section: [f"{name.partition('.')[2]} = {value}\n" for name, value in names.items()
                            if name.startswith(f"{section}.")] for section in SECTIONS}
        file.write_text("".join(f"[{section}]\n{''.join(lines)}" for section, lines in tables.items()))
        return ["--config", str(file)], {}
    if source == "environment":
        return [], {f"EPDD_{name.replace('.', '_').upper()}": str(value) for name, value in names.items()}
    return [word for name, value in names.items() for word in ("--set", f"{name}={value}")], {}


@pytest.mark.parametrize("source", ["file", "environment", "--set"])
@pytest.mark.parametrize("old, new", RENAMED.items())
def test_a_former_name_works_with_one_warning(no_system_file, tmp_path, old, new, source):
    argv, environ = given(tmp_path, source, **{old.replace(".", "__"): 17})
    found, args = config.load([*argv, *(argv if source == "--set" else ())], environ)
    section, key = new.split(".")
    assert found == Config().with_values(section, {key: 17}, "test") != Config()
    assert len(args.warnings) == 1 and old in args.warnings[0] and new in args.warnings[0]
    argv, environ = given(tmp_path, source, **{new.replace(".", "__"): 17})
    assert config.load(argv, environ)[1].warnings == []


@pytest.mark.parametrize("source", ["file", "environment", "--set"])
@pytest.mark.parametrize("old, new", RENAMED.items())
def test_a_former_name_beside_the_new_one_is_refused(no_system_file, tmp_path, old, new, source):
    for both in ((old, new), (new, old)):
        argv, environ = given(tmp_path, source, **{name.replace(".", "__"): 17 for name in both})
        with pytest.raises(ConfigError) as refused:
            config.load(argv, environ)
        assert all(name in refused.value.message for name in both)


def test_a_former_name_in_the_file_beside_the_new_one_in_the_environment_is_refused(no_system_file, tmp_path):
    argv, _ = given(tmp_path, "file", pd__batch_max=3)
    with pytest.raises(ConfigError, match=r"pd.batch_max \(.*epdd.toml\) .* pd.max_sequences \(environment\)"):
        config.load(argv, {"EPDD_PD_MAX_SEQUENCES": "4"})


def test_a_value_under_a_former_name_is_refused_by_the_new_one(no_system_file):
    with pytest.raises(ConfigError, match="--set: pd.max_sequences is 'x'; a whole number expected"):
        load("--set", "pd.batch_max=x")


def test_cache_alone_may_be_negative(no_system_file):
    assert load("--set", "arena.cache_bytes=-1").arena.cache_bytes == -1


def test_each_policy_has_a_description():
    policy = next(field for field in structs.fields(RouterSettings) if field.name == "policy")
    assert bare(policy.type)[0].values == tuple(POLICIES)


@pytest.mark.parametrize("environ, folder", [
    ({"RUNTIME_DIRECTORY": "/run/epdd:/run/b", "XDG_RUNTIME_DIR": "/run/user/1"}, "/run/epdd"),
    ({"XDG_RUNTIME_DIR": "/run/user/1"}, "/run/user/1/epdd"), ({}, r"/tmp/epdd-\d+")])
def test_runtime_folder(environ, folder):
    assert re.fullmatch(folder, str(runtime_dir(environ)))


def test_admin_socket(monkeypatch):
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/epdd")
    assert str(config.admin_socket(Config(), 80)) == "/run/epdd/admin-80.sock"
    assert str(config.admin_socket(Config().with_values("admin", {"socket": "/a"}, "test"), 80)) == "/a"

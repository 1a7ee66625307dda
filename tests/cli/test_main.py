import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from epdd import __version__
from epdd.cli.main import main
from epdd.families import DEMO


@pytest.mark.parametrize("arguments, code, told", [
    (["sreve", "x"], 2, "no verb sreve; did you mean serve?"),
    (["status"], 2, "no verb status; run epdctl status"),
    (["Qwen/Qwen3-VL-2B-Instruct"], 2, "did you mean epdd serve Qwen/Qwen3-VL-2B-Instruct?"),
    (["--port", "80"], 2, "options come after a verb, as in epdd serve --port"),
    (["xyz"], 2, "no verb xyz (see epdd --help)"),
    (["pull"], 2, "the following arguments are required: MODEL (see epdd pull --help)"),
    (["pull", "org/name", "--revison", "v1"], 2, "unknown option --revison; did you mean --revision?"),
    (["check", "a", "b"], 2, "one argument too many: b"),
    (["plan", "--wyh"], 2, "unknown option --wyh; did you mean --why?"),
    (["pull", str(DEMO)], 78, "is a folder here already"),
    (["pull", "https://hub.example/org/name/tree/main"], 78, "is an address; name the model as org/name"),
    (["check", "hf://org/name"], 78, "is an address; name the model as org/name"),
    (["check", "nowhere"], 78, "nowhere: no such folder; name a checkpoint's folder, or a model of the Hub as ORG/"),
    (["serve", "--modle", "x"], 78, "unknown option --modle; did you mean --model? (see epdd serve --help)"),
    (["serve", "--max-model-len=9"], 78, "no option --max-model-len here: --set model.max_model_len=N"),
    (["serve", "a", "--model", "b"], 78, "two models: a and --model b; name one"),
    (["serve", "--set", "model.dtpye=x"], 78, "unknown setting model.dtpye; did you mean dtype?"),
    (["serve", "--set", "moddel.dtype=x"], 78, "unknown section [moddel]; did you mean model?")])
def test_one_sentence_says_what_was_meant(capsys, arguments, code, told):
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert told in err and err.startswith("epdd: ") and err.count("\n") == 1 and not out


@pytest.mark.parametrize("module, when", [
    ("tomllib", "True"), ("sitecustomize", "sys.orig_argv[1:3] == ['-m', 'epdd']")])
def test_an_early_ctrl_c_shows_no_traceback(tmp_path, module, when):
    """During the command's import, and during the start of the daemon's interpreter."""
    (tmp_path / f"{module}.py").write_text(
        f"import os, signal, sys\nif {when}:\n    os.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run([sys.executable, "-m", "epdd.cli", "serve", "--port", "0"], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": path}, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_help_and_version(capsys):
    assert main([]) == main(["--help"]) == main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.count("epdd serve [MODEL]") == 2 and out.endswith(f"\nepdd {__version__}\n")


def test_check_for_people_and_for_programs(capsys):
    assert main(["check", str(DEMO)]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert (lines["family"], lines["dtype"], lines["served"]) == ("qwen3_vl", "float16", "yes")
    assert lines["parameters"] == "1.10 million vision, 0.98 million language"
    assert main(["check", str(DEMO), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == {"vision": 1101984, "language": 984448}
    assert found["bytes"] == {"vision": 2 * 1101984, "language": 2 * 984448}
    text = json.loads((DEMO / "config.json").read_text())["text_config"]
    keys = text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"]
    assert found["kv_bytes_per_token"] == 2 * 2 * keys       # keys and values, two bytes each
    assert (found["served"], found["files"]) == (True, ["model.safetensors"])


def test_check_of_what_is_not_served(capsys, tmp_path):
    folder = shutil.copytree(DEMO, tmp_path / "m")
    (folder / "model.safetensors").write_bytes((DEMO / "model.safetensors").read_bytes()[:-1])
    assert main(["check", str(folder), "--json"]) == 78
    out, err = capsys.readouterr()
    assert json.loads(out)["served"] is False and "model.safetensors" in json.loads(out)["why"]
    assert err == f"epdd: {json.loads(out)['why']}\n"


def test_plan(capsys):
    assert main(["plan", "--why"]) == 0
    assert "encoder/0" in capsys.readouterr().out
    assert main(["plan", "--set", "encoder.workers=gpu:99"]) == 78

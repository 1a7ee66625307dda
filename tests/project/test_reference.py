"""docs/reference is current and complete."""

import re

import pytest

from epdd import errors
from epdd.cli.main import VERBS
from epdd.frontend.api import openapi
from epdd.ops import exposition
from epdd.settings.config import SECTIONS
from tools.reference import __main__ as reference

PAGES = reference.pages()


@pytest.mark.parametrize("path, text", reference.files().items(), ids=lambda value: getattr(value, "name", ""))
def test_pages_are_current(path, text):
    assert reference.is_current(path, text), "run make reference"


def test_every_page_is_made():
    assert {path.name for path in reference.FOLDER.glob("*.md")} == PAGES.keys()


def test_every_setting_is_there():
    assert re.findall(r"^### (\S+)$", PAGES["settings.md"], re.MULTILINE) == [
        f"{name}.{key}" for name, section in SECTIONS.items() for key in section.__struct_fields__]
    assert ('### router.policy\n\nDefault `"earliest"`, one of `"budget"`, `"earliest"`, `"least-loaded"`, '
            '`"round-robin"`, `"gpu-only"`.\n') in PAGES["settings.md"]
    assert r"between \<think> and \</think>" in PAGES["settings.md"]      # escaped, not an unknown element


def test_every_command_is_there():
    assert re.findall(r"^## epdd (\S+)$", PAGES["epdd.md"], re.MULTILINE) == list(VERBS)
    assert "| `-i IMAGE`, `--image IMAGE` | " in PAGES["epdctl.md"]
    assert "## epdctl drain\n" in PAGES["epdctl.md"] and "| `WORKER` | " in PAGES["epdctl.md"]


def test_every_path_and_object_is_there():
    for operation in openapi.OPERATIONS:
        short = operation.path.removeprefix("/v1")
        assert re.search(rf"^## {operation.method.upper()} (/v1)?{re.escape(short)}$", PAGES["http.md"], re.MULTILINE)
    assert set(re.findall(r"\]\(#(\w+)\)", PAGES["http.md"])) <= {
        name.lower() for name in re.findall(r"^### (\w+)$", PAGES["http.md"], re.MULTILINE)}


def test_every_metric_is_there_and_explains_itself():
    rows = dict(re.findall(r"^\| `epdd_(\w+)` \| .* \| (.*) \|$", PAGES["metrics.md"], re.MULTILINE))
    for name, text, _, _ in (*exposition.GAUGES, *((f"{row[0]}_total", *row[1:]) for row in exposition.COUNTERS)):
        assert rows[name] == text
    for name, text in rows.items():
        assert text.endswith(".") and text.split()[0] not in ("It", "Its", "Of", "That", "The", "Their"), name
    assert len(set(rows.values())) == len(rows)


def test_every_error_code_is_there():
    rows = {code: status for code, status in re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGES["errors.md"], re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EpddError)]
    bases = {"startup_failed", "unavailable", "worker_error"}
    assert {kind.code for kind in kinds} - bases <= rows.keys()
    assert (rows["worker_lost"], rows["image_too_large"], rows["method_not_allowed"], rows["address_taken"]) == (
        "503", "400", "405", "75")

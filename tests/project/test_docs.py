"""What the documentation's build does not check: pages in the root, names that no longer exist, other hosts."""

import importlib.util
import re
from pathlib import Path

import pytest

from epdd.hardware import saved
from epdd.settings.config import SECTIONS

ROOT = Path(__file__).parents[2]
# Not CHANGELOG.md, which has former names.
PAGES = [*(ROOT / "docs").rglob("*.md"), *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md")]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)")


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_pages_in_the_root_lead_somewhere(name):
    links = [link for link in LINK.findall((ROOT / name).read_text()) if not link.startswith("http")]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) < 6 << 10


def test_pictures_load_nothing():
    """An SVG may name other files, which a browser then asks for."""
    for path in (ROOT / "docs" / "img").glob("*.svg"):
        text = path.read_text()
        assert not re.search(r"<(?:script|image|foreignObject)|@import|href=\"(?!#)|url\((?!#)", text), path.name


def test_the_machine_that_a_page_describes_can_be_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", (ROOT / "docs/howto/placement.md").read_text(), re.DOTALL)[1], {})
    topology = saved.load(tmp_path / "machine.json")
    assert (len(topology.nodes), len(topology.cpus), len(topology.gpus)) == (4, 128, 8)


def test_settings_that_pages_name_exist():
    settings = {f"{name}.{key}" for name, section in SECTIONS.items() for key in section.__struct_fields__}
    name = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.(?!py\b|safetensors\b)\w+)[` ]")
    named = {found for path in PAGES for found in name.findall(path.read_text())}
    assert "router.slack" in named
    assert named - settings == set()


def test_metrics_that_pages_name_exist():
    metrics = set(re.findall(r"`(epdd_\w+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text()))
    named = {found for path in PAGES for found in re.findall(r"\b(epdd_\w+)", path.read_text())}
    assert "epdd_worker_state" in named
    assert named - metrics == set()


def test_programs_and_tests_that_pages_name_exist():
    text = "\n".join(path.read_text() for path in PAGES)
    programs = set(re.findall(r"\b(tools(?:\.\w+)+)", text))
    assert "tools.simulate" in programs
    assert {name for name in programs if not importlib.util.find_spec(name)} == set()
    tests = set(re.findall(r"`((?:\w+/)*test_\w+\.py)\b", text))      # SECURITY.md leaves tests/ out
    assert "dispatch/test_pipeline.py" in tests
    assert {name for name in tests if not (ROOT / name).exists() and not [*(ROOT / "tests").rglob(name)]} == set()


def test_files_that_the_source_names_exist():
    """In comments and docstrings too."""
    name = re.compile(r"(?<![\w/.])((?:tools|epdd|docs|systemd|etc)/[\w/-]+\.(?:py|md|cpp|h|sh|toml|service))\b")
    texts = [*PAGES, ROOT / "epdd" / "demo" / "README.md",
             *(path for folder in ("epdd", "tests", "tools") for path in (ROOT / folder).rglob("*.py"))]
    named = {(str(path.relative_to(ROOT)), found) for path in texts for found in name.findall(path.read_text())}
    assert ("tests/project/test_docs.py", "tools/venv.sh") in named
    # SECURITY.md leaves tests/ out.
    assert {(path, found) for path, found in named
            if not (ROOT / found).exists() and not (ROOT / "tests" / found).exists()} == {
        ("tests/project/test_docs.py", "tools/none.py")}     # this line

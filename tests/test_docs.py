"""What the documentation's own build does not see: the pages in the root, and that nothing is loaded from elsewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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

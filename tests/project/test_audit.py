"""tools/audit.py finds each kind of fault."""

from email.message import Message

import pytest

from tools import audit

PINNED = {"aiohttp": "3.14.5", "torch": "2.13.0"}


def test_what_is_installed_is_what_was_tested():
    assert not list(audit.differing(PINNED, {"aiohttp": "3.14.5", "torch": "2.13.0+cpu", "pip": "26", "epdd": "1",
                                             "nvidia-cublas": "13"}))
    assert list(audit.differing(PINNED, {"aiohttp": "3.14.4", "leftpad": "1"})) == [
        "aiohttp 3.14.4 is installed, constraints.txt has 3.14.5",
        "leftpad 1 is installed and not in constraints.txt"]


def test_known_holes_in_pins_and_in_what_setup_cfg_allows(monkeypatch):
    assert not list(audit.holes(PINNED))
    pinned, = audit.holes({"aiohttp": "3.14.2"})
    assert pinned.startswith("constraints.txt has aiohttp 3.14.2; 3.14.3 mended CVE-")
    monkeypatch.setitem(audit.MENDED, "orjson", ("99", "a hole"))
    allowed, = audit.holes(PINNED)
    assert allowed.startswith("setup.cfg lets orjson 3.10 in; 99 mended a hole")


@pytest.mark.parametrize(("fields", "found"), [
    ({"License-Expression": "MIT AND (Apache-2.0 OR BSD-3-Clause)"}, []),
    ({"License-Expression": "MIT OR GPL-3.0-only"}, ["x has the licence 'GPL-3.0-only'"]),
    ({"License": "Ours alone\nand more", "Classifier": "License :: OSI Approved :: BSD License"}, []),
    ({"License": "Ours alone\nand more"}, ["x has the licence 'Ours alone'"]),
    ({}, ["x has the licence 'none'"]),
])
def test_licences(fields, found):
    told = Message()
    for name, value in fields.items():
        told[name] = value
    assert list(audit.licence_faults("x", told)) == found

"""A topology survives saving and loading."""

import json
from dataclasses import replace

import pytest

from epdd.errors import HardwareError
from epdd.hardware import saved
from epdd.hardware.probe import probe
from epdd.hardware.topology import Cache, HugePages, Link
from tests.hardware.trees import tree, two_nodes
from tests.placement.machines import machine


def test_what_was_saved_is_loaded(tmp_path):
    many = machine([3, 2], gpu_nodes=[0, None])
    gpus = tuple(replace(gpu, links=(Link(1 - gpu.index, "NVLink", True),)) for gpu in many.gpus)
    full = replace(many, gpus=gpus, cpu_quota=2.5, offline=(99,), barred=(98,), caches=(Cache(3, 1 << 20, (0, 1)),),
                   huge_pages=(HugePages(2 << 20, 5, 4),), transparent_huge_pages="always", warnings=("a warning",),
                   amx_allowed=False)
    for topology in (full, probe(tree(tmp_path / "root", two_nodes())), probe(tmp_path), probe()):
        saved.save(topology, tmp_path / "machine.json")
        assert saved.load(tmp_path / "machine.json") == topology


@pytest.mark.parametrize("change, words", [
    (lambda content: content.update(epdd_topology=2), "topology of version 2; this epdd reads version 1"),
    (lambda content: content.pop("epdd_topology"), "is not a saved topology: .*epdd_topology"),
    (lambda content: content["topology"]["cpus"][1].update(core="x"), "Expected `int`, got `str` - at `.*cpus"),
    (lambda content: content["topology"].pop("nodes"), "missing required field `nodes`")])
def test_what_is_no_topology_is_refused(tmp_path, change, words):
    path = tmp_path / "machine.json"
    saved.save(machine([2]), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(HardwareError, match=words):
        saved.load(path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(HardwareError, match="none.json: No such file"):
        saved.load(tmp_path / "none.json")
    with pytest.raises(HardwareError, match="Is a directory"):
        saved.save(machine([1]), tmp_path)
    (tmp_path / "text").write_text("sockets: 2")
    with pytest.raises(HardwareError, match="is not a saved topology"):
        saved.load(tmp_path / "text")

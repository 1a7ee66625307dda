"""Recorded /sys trees of real machines, where they are at hand: the probe must tell what lscpu and hwloc do."""

import json
import re
import tarfile
from collections import defaultdict
from pathlib import Path

import pytest

from epdd.hardware.probe import probe
from epdd.hardware.topology import ranges

ARCHIVES = Path(__file__).resolve().parents[3] / "shared" / "topology"
# What the probe reads; the whole trees are far larger.
WANTED = re.compile(r"(^|/)(proc/(cpuinfo|meminfo|mounts|self/(status|cgroup))"
                    r"|sys/devices/system/cpu/(online|cpu\d+/(online|topology/\w+))"
                    r"|sys/devices/system/node/(\w+|node\d+/(cpulist|cpumap|meminfo|distance)))$")

if not (ARCHIVES / "expected.json").is_file():
    pytest.skip("no recorded topologies at ../shared/topology", allow_module_level=True)

EXPECTED = json.loads((ARCHIVES / "expected.json").read_text())


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """Folder of each key in expected.json; every archive is unpacked once."""
    keys = defaultdict(list)
    for key in EXPECTED:
        keys[key.split("/")[0]].append(key)
    folders = {}
    for name, members in keys.items():
        archive = next(path for path in ARCHIVES.iterdir() if path.name.startswith(name + ".t") and ".tar" in path.name)
        root = tmp_path_factory.mktemp(name)
        with tarfile.open(archive) as tar:
            for member in tar:
                if WANTED.search(member.name) and (member.isfile() or member.issym()):
                    try:
                        tar.extract(member, root, filter="data")
                    except (tarfile.FilterError, OSError):      # a link that leads out of the tree
                        continue
        for key in members:
            folders[key] = root / key.partition("/")[2]
    return folders


@pytest.mark.parametrize("key", EXPECTED)
def test_saved_machine(trees, key):
    want = EXPECTED[key]
    found = probe(trees[key])
    assert found.sockets == want["sockets"]
    assert [node.id for node in found.nodes] == want["nodes"]
    assert len(found.cpus) == want["online_cpus"]
    assert {str(node.id): ranges(node.cpus) for node in found.nodes} == want["node_cpus_online"]
    assert [node.id for node in found.nodes if node.cpus] == want["cpu_nodes"]
    assert found.amx == want["amx"]
    for node in found.nodes:
        megabytes = want["node_mem_mb"][str(node.id)]
        assert node.memory_bytes is None if megabytes is None else node.memory_bytes >> 20 == megabytes
    if "cpusets" not in key and "cgroup" not in key:      # there hwloc stays within the recorded limits
        assert found.cores == want["hwloc_allowed"]["Core"]

"""`epdctl plan` and `epdctl topology`."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from epdd import placement
from epdd.ctl import picture
from epdd.ctl.main import main
from epdd.hardware import saved
from epdd.hardware.topology import Cpu, Link, NumaNode, Topology
from epdd.settings.config import Config
from tests.ctl.fake_daemon import FakeDaemon
from tests.ctl.snapshot import snapshot, worker
from tests.placement.machines import FAMILY, GIB, machine
from tests.placement.test_placement_any import topologies

NO_DAEMON = ["--socket", "/nowhere/admin.sock"]


@pytest.fixture
def file(tmp_path):
    """file(topology): where it is saved."""
    def save(topology):
        saved.save(topology, tmp_path / "machine.json")
        return str(tmp_path / "machine.json")
    return save


def two_sockets():
    """Two nodes of six cores, two GPUs, and memory without CPUs."""
    made = machine([6, 6], gpu_nodes=[0, 1])
    gpus = tuple(replace(gpu, links=(Link(1 - gpu.index, "sockets", False),)) for gpu in made.gpus)
    rows = (((0, 10), (1, 21), (4, 17)), ((0, 21), (1, 10), (4, 28)), ((0, 17), (1, 28), (4, 10)))
    nodes = [replace(node, distances=row) for node, row in zip((*made.nodes, NumaNode(4, (), 64 * GIB)), rows)]
    return replace(made, gpus=gpus, nodes=tuple(nodes),
                   offline=(24, 25), warnings=("GPU 2 cannot be used: GPU is lost",))


def test_plan(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert main(["plan", "--sysroot", str(tmp_path / "empty")]) == 78
    assert "no CPU" in capsys.readouterr().err
    assert main(["plan", "--set", "encoder.wrong=2"]) == 78
    online = tmp_path / "sys/devices/system/cpu/online"
    online.parent.mkdir(parents=True)
    online.write_text("0-3")
    argv = ["plan", "--sysroot", str(tmp_path), "--set", "encoder.workers=2", "--set", "arena.bytes=67108864"]
    assert main(argv) == 0
    assert re.search(r"encoder/1 +cpu .*32 MiB\npd/0", capsys.readouterr().out)
    assert main([*argv, "--json"]) == 0
    assert [spec["cpus"] for spec in json.loads(capsys.readouterr().out)] == [[2], [3], [0, 1]]


def test_plan_for_a_machine_elsewhere_with_its_reasons(capsys, file):
    argv = ["plan", "--topology", file(two_sockets()), "--set", "encoder.workers=gpu:1,cpu:2"]
    assert main(argv) == 0
    plain = capsys.readouterr().out
    assert re.search(r"^pd/0 +cuda:1 +1 +6 +1 ", plain, re.MULTILINE)
    assert "kept for the daemon" not in plain
    assert main([*argv, "--why"]) == 0
    why = capsys.readouterr().out
    assert "\n- encoder: 1 on GPUs, 2 on CPUs: asked: gpu:1,cpu:2\n" in why
    assert "\n- pd/0 (cuda:1): 1 core of NUMA node 1, the GPU's own\n" in why


def test_plan_refuses_what_does_not_fit(capsys, file):
    path = file(two_sockets())
    assert main(["plan", "--topology", path, "--set", "pd.workers=gpu:3"]) == 78
    assert "that takes 3 GPUs; there are 2 GPUs" in capsys.readouterr().err
    assert main(["plan", "--topology", path + "x"]) == 78
    assert "machine.jsonx: No such file" in capsys.readouterr().err


def test_saved_here_and_loaded(capsys, tmp_path):
    path = tmp_path / "here.json"
    assert main(["topology", "--save", str(path)]) == 0
    assert capsys.readouterr().out == f"saved to {path}\n"
    assert main([*NO_DAEMON, "topology"]) == 0
    here = capsys.readouterr().out
    assert main(["topology", "--load", str(path)]) == 0
    assert capsys.readouterr().out == here
    assert main(["topology", "--save", str(tmp_path / "none" / "x")]) == 1


def test_the_picture(capsys, file):
    assert main(["topology", "--load", file(two_sockets())]) == 0
    out = capsys.readouterr().out
    assert out == (Path(__file__).with_name("topology.txt")).read_text()


def test_a_machine_that_no_plan_fits_is_drawn_all_the_same(capsys, file):
    assert main(["topology", "--load", file(two_sockets()), "--set", "pd.workers=9"]) == 0
    out = capsys.readouterr().out
    assert "│ 6 cores, CPUs 0-5,12-17" in out and "· · · · · ·" in out
    assert "no workers: encoder.workers is auto, pd.workers is 9: that takes 9 GPUs" in " ".join(out.split())


def test_the_running_daemon_says_where_its_workers_are(capsys, tmp_path):
    """Not the plan's: one worker is in the wrong place, one is not bound, one has no CPUs yet."""
    workers = [worker("encoder/7", cpus=[0], numa_node=None, state="DRAINING"), worker("pd/3", cpus=[99]),
               worker("pd/4", cpus=None, state="STARTING")]
    with FakeDaemon(tmp_path / "admin-1.sock", {"status": snapshot(workers=workers)}) as daemon:
        assert main(["--socket", daemon.server_address, "topology"]) == 0
        out = capsys.readouterr().out
        assert re.search(r"H encoder/7  CPU +1 core  CPU 0 .*\n.*memory not bound, DRAINING", out)
        assert "pd/3 (cpu) READY" in out and "pd/4 (cpu) STARTING" in out
        daemon.answers["status"] = {"workers": [{}]}
        assert main(["--socket", daemon.server_address, "topology"]) == 1
    assert "another version" in capsys.readouterr().err


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_any_picture_fits_and_shows_every_worker_and_gpu(topology):
    specs = placement.plan(topology, Config(), FAMILY, GIB)
    workers = [picture.DrawnWorker(spec.name, spec.device, spec.cpus, spec.numa_node) for spec in specs]
    plain = picture.draw(topology, workers, "as planned")
    assert max(map(len, plain.splitlines())) <= 100
    for spec in specs:
        assert f" {spec.name} " in plain
    for gpu in topology.gpus:
        assert plain.count(gpu.bus_id) == 1
    for node in topology.nodes:
        assert f"NUMA node {node.id}, " in plain
    assert re.sub(r"\x1b\[\d+m", "", picture.draw(topology, workers, "as planned", colour=True)) == plain


def test_signs_of_cores():
    """Shared cores, free ones, and the two kinds of a hybrid processor."""
    cpus = tuple(Cpu(i, i, 0, 0, (i,), "P" if i < 3 else "E") for i in range(6))
    drawn = picture.draw(Topology(cpus, (NumaNode(0, tuple(range(6)), GIB),)), [
        picture.DrawnWorker("encoder/27", "cpu", (0, 1), 0), picture.DrawnWorker("pd/11", "cpu", (1, 3), 0)], "")
    assert "│ P B * · " in drawn and "│ E b · · " in drawn
    assert "* several workers" in drawn


def test_completion_knows_the_options():
    script = Path(__file__).parents[2] / "etc" / "completion.bash"
    answer = subprocess.run(
        ["bash", "-c", f"source {script}; COMP_WORDS=(epdctl topology --); COMP_CWORD=2; _epdctl; "
                       "echo ${COMPREPLY[@]}"], capture_output=True, text=True, check=True).stdout.split()
    assert {"--save", "--load"} <= set(answer)

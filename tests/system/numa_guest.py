"""Runs inside the machine of numa_machine.py: the real probe, plan, fork server, binding and supervisor.

Prints one JSON object of what /proc says after each change; what is right is test_numa.py's to say.  Reads /proc
by its own code, not by that under test.
"""

import asyncio
import ctypes
import json
import os
import re
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

from epdd import arena, families, placement
from epdd.config import Config
from epdd.fleet.process import ForkServer
from epdd.fleet.seating import Seating
from epdd.fleet.supervisor import Supervisor
from epdd.fleet.worker import State
from epdd.hardware.probe import probe
from epdd.worker import affinity
from tests.system import numa_worker

ARENA_BYTES = 20 << 20
CGROUP = Path("/sys/fs/cgroup")
CONFIG = Config().with_values("arena", {"bytes": ARENA_BYTES}, "test")
FAMILY = families.load(str(families.DEMO))


class Nvml(types.ModuleType):
    """Display devices as GPUs; what it does not know fails as NVML does where a card cannot do it."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    NVMLError_LibraryNotFound = NVMLError_FunctionNotFound = NVMLError_NotSupported

    devices = sorted(path.parent.name for path in Path("/sys/bus/pci/devices").glob("*/class")
                     if path.read_text().startswith("0x03"))

    def __getattr__(self, name):
        known = {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None,
                 "nvmlDeviceGetCount": lambda: len(self.devices),
                 "nvmlDeviceGetHandleByIndex": lambda index: index,
                 "nvmlDeviceGetName": lambda handle: "display",
                 "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=8 << 30),
                 "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(busId="0000" + self.devices[handle])}
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return known.get(name, self._cannot)

    def _cannot(self, *args):
        raise self.NVMLError_NotSupported("Not Supported")


def plan():
    """As the daemon's, for workers that need no model."""
    specs = placement.plan(probe(), CONFIG, FAMILY, ARENA_BYTES)
    return [replace(spec, model="{}") for spec in specs]


def seen(pid):
    """A process's binding: CPUs of each thread, policy and pages of the memory that it touched, and its arena's."""
    def field(path, name):
        return re.search(rf"^{name}:\s*(\S+)", Path(path).read_text(), re.MULTILINE)[1]

    maps = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
    # At least: the kernel joins neighbouring mappings, a thread's stack say.
    touched = [line for line in maps
               if int((re.search(r" anon=(\d+)", line) or [0, 0])[1]) >= numa_worker.TOUCHED_BYTES >> 12]
    shared = [line for line in maps if "epdd-arena" in line]
    return {"cpus": sorted({field(task / "status", "Cpus_allowed_list")
                            for task in Path(f"/proc/{pid}/task").iterdir()}),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
            "policy": [line.split()[1] for line in touched],
            "pages": sorted({node for line in touched for node in re.findall(r" (N\d+)=", line)}),
            "arena": sorted({node for line in shared for node in re.findall(r" (N\d+)=", line)})}


def spec_seen(spec, pid, warning):
    return {"device": spec.device, "spec_cpus": spec.cpus, "node": spec.numa_node, "wanted_threads": spec.threads,
            "pid": pid, "warning": warning, **seen(pid)}


async def running():
    """A whole fleet through changes of the machine."""
    os.mkdir(CGROUP / "epdd")
    (CGROUP / "epdd/cgroup.procs").write_text(str(os.getpid()))
    stages = {}
    supervisor = Supervisor(plan(), arena.create(ARENA_BYTES), CONFIG.fleet,
                            ForkServer(["tests.system.numa_worker"], "tests.system.numa_worker"), lambda worker: None)
    seats = Seating(supervisor, plan)

    async def stage(name):
        await seats.look()
        async with asyncio.timeout(60):
            while not all(worker.state is State.READY for worker in supervisor.workers):
                await asyncio.sleep(0.05)
        stages[name] = {worker.name: spec_seen(worker.spec, worker.process.pid, worker.ready.binding.warning)
                        for worker in supervisor.workers}
        print(f"{name} after {time.monotonic():.0f} s", flush=True)

    supervisor.start()
    await stage("whole")
    online = Path("/sys/devices/system/cpu/cpu7/online")
    online.write_text("0")
    await stage("offline")
    online.write_text("1")
    await stage("online again")
    (CGROUP / "epdd/cpuset.cpus").write_text("0-3")
    (CGROUP / "epdd/cpuset.mems").write_text("0-1")
    await stage("cpuset shrunk")
    # One step more than a shrunk one: the kernel now maps each policy's nodes onto the new ones, 1 becomes 2.
    (CGROUP / "epdd/cpuset.mems").write_text("1-2")
    (CGROUP / "epdd/cpuset.cpus").write_text("2-5")
    await stage("cpuset moved")
    await supervisor.stop()
    return stages


def planned(prepare):
    """In a process of its own that `prepare` limits first: a plan, and each of its workers bound."""
    def limited():
        prepare()
        bound = {}
        for spec in plan():
            bound[spec.name] = forked(lambda spec=spec: bind(spec))
        return bound

    return forked(limited)


def bind(spec):
    warning = affinity.bind(spec).warning
    memory = numa_worker.touched()
    found = spec_seen(spec, os.getpid(), warning)
    memory.close()
    return found


def forked(call):
    """What `call` returns in a child."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        with open(writer, "w") as file:
            json.dump(call(), file)
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        found = json.load(file)
    os.waitpid(pid, 0)
    return found


def limit_cpuset():
    folder = CGROUP / "limited"
    folder.mkdir()
    (folder / "cpuset.cpus").write_text("0-3")
    (folder / "cpuset.mems").write_text("0-1")
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def limit_policy():
    """As NUMAPolicy=bind, NUMAMask=1-2 in a unit."""
    assert ctypes.CDLL(None).syscall(238, 2, ctypes.byref(ctypes.c_ulong(0b110)), ctypes.c_ulong(65)) == 0


def outside_the_policy():
    limit_policy()
    return bind(replace(plan()[-1], cpus=(0,), numa_node=0))


def main():
    sys.modules["pynvml"] = Nvml("pynvml")
    (CGROUP / "cgroup.subtree_control").write_text("+cpuset")
    topology = probe()
    found = {
        "topology": {"sockets": topology.sockets, "gpus": [gpu.numa_node for gpu in topology.gpus],
                     "nodes": {node.id: [node.cpus, node.has_memory] for node in topology.nodes},
                     "distances": dict(topology.nodes[0].distances)},
        "under a cpuset": planned(limit_cpuset), "under a policy": planned(limit_policy),
        "outside the policy": forked(outside_the_policy),
        "running": asyncio.run(running())}
    print(f"\n## FOUND {json.dumps(found)}", flush=True)

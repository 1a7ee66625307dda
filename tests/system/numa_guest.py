"""Runs inside the machine of numa_machine.py: changes the CPUs and memory nodes of epdd.service.

Prints one JSON object with /proc's state after each change, which test_numa.py checks.  Reads /proc by its own code,
not by the code under test.
"""

import json
import os
import re
import subprocess
import time
from pathlib import Path

from epdd.ctl import client
from epdd.hardware.probe import probe
from tests.system import numa_gpus, numa_worker

UNIT = "epdd.service"
SOCKET = Path("/run/epdd/admin-8765.sock")
CHANGE_S = 120.0        # the daemon checks every 5 s, and the machine is slow


def systemctl(*argv):
    # Its 25 s pass quickly while the kernel moves pages to other nodes during systemd's write to the cpuset.
    environment = {**os.environ, "SYSTEMD_BUS_TIMEOUT": str(CHANGE_S)}
    return subprocess.run(["systemctl", *argv], check=True, stdout=subprocess.PIPE, text=True, env=environment
                          ).stdout.strip()


def allow(cpus, nodes):
    """To the running service; empty: all."""
    systemctl("set-property", "--runtime", UNIT, f"AllowedCPUs={cpus}", f"AllowedMemoryNodes={nodes}")


def seen(worker):
    """A worker as planned, and its binding: CPUs of each thread, policy and pages of its memory, and its arena's."""
    def cpus(task):
        return re.search(r"^Cpus_allowed_list:\s*(\S+)", (task / "status").read_text(), re.MULTILINE)[1]

    process = Path(f"/proc/{worker['pid']}")
    threads = list((process / "task").iterdir())
    maps = (process / "numa_maps").read_text().splitlines()
    # At least: the kernel joins neighbouring mappings, a thread's stack say.
    touched = [line for line in maps
               if int((re.search(r" anon=(\d+)", line) or [0, 0])[1]) >= numa_worker.TOUCHED_BYTES >> 12]
    shared = [line for line in maps if "epdd-arena" in line]
    return {"device": worker["device"], "node": worker["numa_node"], "planned_cpus": worker["planned_cpus"],
            "planned_threads": worker["planned_threads"], "pid": worker["pid"], "warning": worker["warning"],
            "cpus": sorted({cpus(task) for task in threads}), "threads": len(threads),
            "policy": [line.split()[1] for line in touched],
            "pages": sorted({node for line in touched for node in re.findall(r" (N\d+)=", line)}),
            "arena": sorted({node for line in shared for node in re.findall(r" (N\d+)=", line)})}


def status():
    """The daemon's workers; none if it does not answer."""
    try:
        return client.ask(SOCKET, "status")["workers"]
    except client.CtlError:
        return []


def settled(cpus, nodes):
    """The service once its workers are planned for exactly these CPUs and NUMA nodes and are all ready."""
    end = time.monotonic() + CHANGE_S
    while time.monotonic() < end:
        workers = status()
        planned = {cpu for worker in workers for cpu in worker["planned_cpus"]}
        on = {worker["numa_node"] for worker in workers if worker["device"] == "cpu"}
        if (planned, on) == (cpus, nodes) and all(worker["state"] == "READY" for worker in workers):
            break
        time.sleep(0.5)
    else:
        raise AssertionError(f"not on CPUs {cpus} of NUMA nodes {nodes} after {CHANGE_S:.0f} s: {workers}")
    group = Path("/sys/fs/cgroup") / systemctl("show", UNIT, "--property=ControlGroup", "--value").lstrip("/")
    return {"daemon": int(systemctl("show", UNIT, "--property=MainPID", "--value")),
            "processes": [int(pid) for pid in (group / "cgroup.procs").read_text().split()],
            "workers": {worker["name"]: seen(worker) for worker in workers}}


def running():
    """One daemon, never told of the changes."""
    online = Path("/sys/devices/system/cpu/cpu7/online")
    every = set(range(8))
    stages = {}

    def stage(name, cpus, nodes):
        stages[name] = settled(cpus, nodes)
        print(f"{name} after {time.monotonic():.0f} s", flush=True)

    systemctl("start", UNIT)
    stage("whole", every, {0, 1, 2, 3})
    online.write_text("0")
    stage("offline", every - {7}, {0, 1, 2, 3})
    online.write_text("1")
    stage("online again", every, {0, 1, 2, 3})
    allow("0-3", "0-1")
    stage("shrunk", {0, 1, 2, 3}, {0, 1})
    allow("", "")
    stage("widened", every, {0, 1, 2, 3})
    # The kernel maps each policy's nodes onto the new ones by their order: 2 becomes 1, also where the placement stays.
    allow("2-5", "1-2")
    stage("moved", {2, 3, 4, 5}, {1, 2})
    return stages


def started_within_limits():
    """A daemon that finds only nodes 1 and 2 in both its cpuset and its memory policy."""
    folder = Path(f"/run/systemd/system/{UNIT}.d")
    folder.mkdir(parents=True)
    (folder / "policy.conf").write_text("[Service]\nNUMAPolicy=bind\nNUMAMask=1-3\n")
    systemctl("daemon-reload")
    allow("0-5", "0-2")
    systemctl("restart", UNIT)
    return settled({2, 3, 4, 5}, {1, 2})


def main():
    numa_gpus.install()
    topology = probe()
    found = {"topology": {"sockets": topology.sockets, "gpus": [gpu.numa_node for gpu in topology.gpus],
                          "nodes": {node.id: [node.cpus, node.has_memory] for node in topology.nodes},
                          "distances": dict(topology.nodes[0].distances)}}
    try:
        found |= {"running": running(), "within limits": started_within_limits()}
    finally:
        subprocess.run(["journalctl", "-u", UNIT, "-o", "short-monotonic", "--no-pager"])
    print(f"\n## FOUND {json.dumps(found)}", flush=True)

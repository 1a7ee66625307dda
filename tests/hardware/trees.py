"""Small fake roots for the readers of /sys and /proc."""

from __future__ import annotations

from pathlib import Path


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


def two_nodes() -> dict[str, str]:
    """Two sockets of two cores with two threads: 0-3 are the cores, 4-7 their siblings."""
    files = {"sys/devices/system/cpu/online": "0-7", "sys/devices/system/node/online": "0-1",
             "proc/cpuinfo": "processor : 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 amx_tile amx_bf16\n",
             "proc/meminfo": "MemTotal:       8388608 kB"}
    for cpu in range(8):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{folder}/physical_package_id"] = str(cpu % 4 // 2)
        files[f"{folder}/core_cpus_list"] = f"{cpu % 4},{cpu % 4 + 4}"
    for node in range(2):
        folder = f"sys/devices/system/node/node{node}"
        files[f"{folder}/cpulist"] = f"{2 * node}-{2 * node + 1},{2 * node + 4}-{2 * node + 5}"
        files[f"{folder}/meminfo"] = f"Node {node} MemTotal:  4194304 kB"
        files[f"{folder}/distance"] = "10 21" if node == 0 else "21 10"
    return files

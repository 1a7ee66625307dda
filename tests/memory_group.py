"""A control group with a memory limit, for processes that the kernel kills for lack of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Group:
    """Below the root of the memory controller, version 1 or 2."""

    def __init__(self, root: Path, limit: str, usage: str) -> None:
        self.root = root
        self.folder = root / f"epdd-test-{os.getpid()}"
        self._limit, self._usage = limit, usage

    def add(self, pid: int) -> None:
        """Add the process: later allocations and children count."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def leave_only(self, spare_bytes: int) -> None:
        """Limit it to its present use and `more` bytes."""
        (self.folder / self._limit).write_text(str(int((self.folder / self._usage).read_text()) + spare_bytes))


@contextmanager
def memory_group() -> Iterator[Group]:
    """Skips the test if no group can be made, which needs root and a delegated controller."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, options = line.split()[:4]
        if kind == "cgroup" and "memory" in options.split(","):
            group = Group(Path(folder), "memory.limit_in_bytes", "memory.usage_in_bytes")
        elif kind == "cgroup2" and "memory" in (Path(folder) / "cgroup.controllers").read_text().split():
            group = Group(Path(folder), "memory.max", "memory.current")
        else:
            continue
        try:
            if kind == "cgroup2":
                (group.root / "cgroup.subtree_control").write_text("+memory")
            group.folder.mkdir()
        except OSError as error:
            pytest.skip(f"no control group can be made: {error}")
        try:
            yield group
        finally:
            group.folder.rmdir()
        return
    pytest.skip("there is no memory controller")


def group_of(pid: int, root: Path) -> Path:
    """The folder of the memory group that a process is in."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or not controllers and (root / "cgroup.controllers").exists():
            return root / path.lstrip("/")
    raise AssertionError(f"process {pid} is in no memory group")

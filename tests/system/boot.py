"""Boots a real systemd as PID 1 on this machine's own /usr, in a temporary container.

The root is an empty tmpfs over a read-only /usr (systemd-nspawn --volatile), so there is no image to build.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BOOT_S = 60.0
STOP_S = 30.0
# A cgroup v2 tree of our own, also where the host still has v1; removed when the container has ended.
OUTER = """
mount -t cgroup2 none /sys/fs/cgroup
group=/sys/fs/cgroup/epdd-test-$$
mkdir -p $group/inner && echo $$ > $group/inner/cgroup.procs || exit 1
"$@"
echo $$ > /sys/fs/cgroup/cgroup.procs
find $group -depth -type d -exec rmdir {} + 2>/dev/null
"""


def missing() -> str:
    """Why a container cannot be booted here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in ("systemd-nspawn", "nsenter", "unshare", "kill"):
        if shutil.which(program) is None:
            return f"needs {program} (Debian: systemd-container, util-linux, procps)"
    if not Path("/usr/lib/systemd/systemd").exists():
        return "needs systemd itself in /usr"
    probe = subprocess.run(["unshare", "-m", "sh", "-c", "mount -t cgroup2 none /sys/fs/cgroup"], capture_output=True)
    return "" if probe.returncode == 0 else "needs to mount cgroup2: this machine is a restricted container"


class Machine:
    """A booted container: `with Machine(folder) as machine: machine.run("systemctl", "start", "epdd")`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "console"
        self._leader = 0

    def __enter__(self) -> Machine:
        with self._log.open("wb") as console:
            self._process = subprocess.Popen(
                ["unshare", "-m", "--propagation", "private", "bash", "-c", OUTER, "bash", *self._nspawn()],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        try:
            self._wait_for_boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *args: object) -> None:
        if self._leader:
            os.kill(self._leader, 37)           # SIGRTMIN+3: PID 1 halts
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            for child in _children(self._process.pid):
                os.kill(child, 9)
            self._process.wait()

    def run(self, *argv: str, check: bool = True, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a program inside, as root."""
        inside = ["nsenter", "-t", str(self._leader), "-a", "env", "-i", "PATH=/usr/bin:/usr/sbin", *argv]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=timeout_s)
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}\n"
                                 f"{self.journal()}")
        return done

    def show(self, *properties: str) -> list[str]:
        """Properties of epdd.service."""
        lines = self.run("systemctl", "show", "epdd", *(f"--property={name}" for name in properties)).stdout
        values = dict(line.partition("=")[::2] for line in lines.splitlines())
        return [values[name] for name in properties]

    def journal(self) -> str:
        return self.run("journalctl", "-u", "epdd", "-o", "cat", "-n", "60", "--no-pager", check=False).stdout

    def processes(self) -> list[int]:
        """The service's processes, by pids outside the container."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cgroup"):
            try:
                group = path.read_text().rpartition("0::")[2].strip()
            except OSError:
                continue        # it ended meanwhile
            if "/epdd-test-" in group and group.endswith("/epdd.service"):
                found.append(int(path.parent.name))
        return found

    def _nspawn(self) -> list[str]:
        binds = installed(self._folder, DROP_IN)
        return ["systemd-nspawn", "--boot", "--directory=/", "--volatile=yes", "--register=no", "--keep-unit",
                "--private-network", "--console=pipe", f"--machine=epdd-test-{os.getpid()}",
                *(f"--bind-ro={source}:{target}" for target, source in binds.items()), "systemd.firstboot=no"]

    def _wait_for_boot(self) -> None:
        end = time.monotonic() + BOOT_S
        while time.monotonic() < end and self._process.poll() is None:
            nspawn = [child for child in _children(self._process.pid) if _name(child) == "systemd-nspawn"]
            self._leader = next((child for pid in nspawn for child in _children(pid) if _name(child) == "systemd"), 0)
            if self._leader:
                state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
                if state in ("running", "degraded"):
                    return
            time.sleep(0.2)
        raise AssertionError(f"systemd did not boot:\n{self._log.read_text(errors='replace')[-4000:]}")


# Differences from the installed service: shorter times.
DROP_IN = """
WatchdogSec=6s
TimeoutAbortSec=1s
"""


def installed(folder: Path, drop_in: str) -> dict[str, Path]:
    """The service as installed by `make install-system`, made in `folder`: paths in the root -> sources.

    The interpreter and the packages that run the tests are below /opt/epdd, where DynamicUser can reach them:
    a venv below /root or /home would be closed to it.
    """
    units = folder / "units"
    (units / "epdd.service.d").mkdir(parents=True)
    shutil.copy(REPOSITORY / "systemd" / "epdd.service", units)
    library = "" if sys.base_prefix == "/usr" else "Environment=LD_LIBRARY_PATH=/opt/epdd/python/lib\n"
    (units / "epdd.service.d" / "test.conf").write_text(
        f"[Service]\nEnvironment=PYTHONPATH=/opt/epdd/source\n{library}{drop_in}")
    (units / "systemd-firstboot.service").symlink_to("/dev/null")       # it would ask questions
    # Copied, since a checkout made under a strict umask would be closed to the service's user.
    source = folder / "source"
    for package in ("epdd", "tests"):
        shutil.copytree(REPOSITORY / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(source, quiet=1)
    for path in (source, *source.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    environment = folder / "venv"
    packages = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    (environment / "bin").mkdir()
    (environment / "bin" / "python").symlink_to(f"/opt/epdd/python/bin/{Path(sys.executable).resolve().name}")
    (environment / "pyvenv.cfg").write_text("home = /opt/epdd/python/bin\n")
    return {"/opt/epdd/venv": environment,
            f"/opt/epdd/{packages.relative_to(folder)}": Path(sysconfig.get_path("purelib")),
            "/opt/epdd/python": Path(sys.base_prefix), "/opt/epdd/source": source, "/etc/systemd/system": units}


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""

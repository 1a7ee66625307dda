"""Boots a real kernel and systemd in QEMU with several NUMA nodes, and runs a Python module there.

Two sockets, four NUMA nodes of two CPUs, a fifth node with memory alone, and three display devices in place of
GPUs: on node 0, on node 2, and on a bus of no node.  The guest's root is an empty tmpfs over this machine's own
/usr, read-only over 9p, with epdd.service as boot.py installs it; there is no disk image.  Emulated, never by KVM.
"""

from __future__ import annotations

import lzma
import platform
import shutil
import subprocess
from pathlib import Path

from tests.system import boot

REPOSITORY = Path(__file__).parents[2]
KERNEL = REPOSITORY / "build" / "kernel"        # downloaded once; `make clean` removes it
BOOT_S = 1800.0         # a hang: it takes two minutes on two idle cores and has taken ten on a busy machine
BOOTS_MAX = 3           # if QEMU itself dies of a signal: its parallel emulation has races on a busy host
# What the kernel needs to mount the root, in the order of their dependencies.
MODULES = ("virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "netfs", "fscache",
           "9pnet", "9pnet_virtio", "9p")
DISTANCES = ((0, 1, 12), (2, 3, 12), (0, 2, 21), (0, 3, 21), (1, 2, 21), (1, 3, 21),
             (0, 4, 28), (1, 4, 28), (2, 4, 17), (3, 4, 17))
NODE_MB, MEMORY_NODE_MB = 320, 128
INIT = """#!/bin/sh
PATH=/bin
mount -t proc proc /proc
mount -t devtmpfs dev /dev
for module in {modules}; do [ ! -e /modules/$module.ko ] || insmod /modules/$module.ko; done
mount -t 9p -o trans=virtio,version=9p2000.L,cache=loose,ro,msize=524288 host /host || poweroff -f
mount -t tmpfs -o mode=755 root /root
cd /root
mkdir -p proc sys dev run tmp etc var usr
for link in bin sbin lib lib64; do ln -s usr/$link $link; done
echo 0123456789abcdef0123456789abcdef > etc/machine-id      # without one a first boot would enable every unit
mount -o bind /host/usr usr
while read -r target source; do mkdir -p .$target; mount -o bind "/host$source" .$target; done < /binds
umount /proc /dev
exec switch_root /root /usr/lib/systemd/systemd
"""
# The guest's only job: when it ends, the machine powers off.
UNIT = """
[Unit]
DefaultDependencies=no
SuccessAction=poweroff-immediate
FailureAction=poweroff-immediate

[Service]
ExecStart=/opt/epdd/venv/bin/python -c 'import {program}; {program}.main()'
Environment=PYTHONPATH=/opt/epdd/source PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH=/opt/epdd/python/lib
StandardOutput=file:/dev/ttyS0
StandardError=inherit
"""


def missing() -> str:
    """Why it cannot be booted here; empty if it can.  May download the kernel."""
    if platform.machine() != "x86_64":
        return "the guest runs this machine's programs on an x86-64 kernel"
    for program in ("qemu-system-x86_64", "cpio", "dpkg-deb", "apt-get"):
        if shutil.which(program) is None:
            return f"needs {program} (Debian: qemu-system-x86, cpio)"
    if not Path("/usr/lib/systemd/systemd").exists():
        return "needs systemd itself in /usr"
    return "" if (KERNEL / "vmlinuz").exists() else _fetch()


def run(program: str, drop_in: str, folder: Path) -> str:
    """The output of the module `program`'s main() in the guest, with `drop_in` for epdd.service."""
    binds = boot.installed(folder, drop_in)
    (folder / "units" / "guest.service").write_text(UNIT.format(program=program))
    command = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off",
               *_nodes(), *_devices(), "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
               "-serial", "stdio", "-monitor", "none",
               "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
               "-device", "virtio-9p-pci,bus=pcie.0,fsdev=host,mount_tag=host",
               "-kernel", str(KERNEL / "vmlinuz"), "-initrd", str(_initrd(folder, binds)),
               "-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr random.trust_cpu=on tsc=unstable "
                          "systemd.unit=guest.service"]
    for _ in range(BOOTS_MAX):
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  timeout=BOOT_S)
            printed = done.stdout
        except subprocess.TimeoutExpired as expired:
            printed = (expired.stdout or b"") + f"\nnot down after {BOOT_S:.0f} s".encode()
            break
        if done.returncode >= 0:
            break
    return printed.decode(errors="replace").replace("\r", "")


def _fetch() -> str:
    """Debian's kernel and a static shell, only the files needed of them.  Returns why not."""
    KERNEL.mkdir(parents=True, exist_ok=True)
    told = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True).stdout
    names = [line.split()[1] for line in told.splitlines() if "Depends: linux-image-" in line]
    if not names or subprocess.run(["apt-get", "download", "-q", names[0], "busybox-static"], cwd=KERNEL,
                                   capture_output=True).returncode:
        return "needs a kernel image, which apt-get cannot download here"
    for package in KERNEL.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, KERNEL / "unpacked"], check=True)
        package.unlink()
    for name in MODULES:
        for found in (KERNEL / "unpacked").rglob(f"{name}.ko*"):        # none: built in, or another's part by now
            content = found.read_bytes()
            (KERNEL / f"{name}.ko").write_bytes(lzma.decompress(content) if found.suffix == ".xz" else content)
    shutil.copy(next((KERNEL / "unpacked").rglob("bin/busybox")), KERNEL)
    shutil.copy(next((KERNEL / "unpacked/boot").glob("vmlinuz-*")), KERNEL / "vmlinuz")     # last: all is there
    shutil.rmtree(KERNEL / "unpacked")
    return ""


def _initrd(folder: Path, binds: dict[str, Path]) -> Path:
    tree = folder / "initrd"
    for name in ("bin", "modules", "host", "root", "proc", "dev"):
        (tree / name).mkdir(parents=True)
    shutil.copy(KERNEL / "busybox", tree / "bin")
    for command in ("sh", "mount", "umount", "mkdir", "ln", "insmod", "switch_root", "poweroff"):
        (tree / "bin" / command).symlink_to("busybox")
    for module in KERNEL.glob("*.ko"):
        shutil.copy(module, tree / "modules")
    (tree / "init").write_text(INIT.format(modules=" ".join(MODULES)))
    (tree / "binds").write_text("".join(f"{target} {source.resolve()}\n" for target, source in binds.items()))
    for path in (tree / "init", tree / "bin" / "busybox"):
        path.chmod(0o755)
    image = folder / "initrd.img"
    with image.open("wb") as file:
        names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
        subprocess.run(["cpio", "--quiet", "-o", "-H", "newc"], cwd=tree, input=names.encode(), stdout=file, check=True)
    return image


def _nodes() -> list[str]:
    options = ["-smp", "8,sockets=2,cores=4,threads=1", "-m", f"{4 * NODE_MB + MEMORY_NODE_MB}M"]
    for node in range(5):
        size, cpus = (NODE_MB, f",cpus={2 * node}-{2 * node + 1}") if node < 4 else (MEMORY_NODE_MB, "")
        options += ["-object", f"memory-backend-ram,id=m{node},size={size}M",
                    "-numa", f"node,nodeid={node}{cpus},memdev=m{node}"]
    for a, b, distance in DISTANCES:
        options += ["-numa", f"dist,src={a},dst={b},val={distance}"]
    return options


def _devices() -> list[str]:
    options = []
    for node, bus in ((0, 64), (2, 128)):
        options += ["-device", f"pxb-pcie,id=bus{node},bus_nr={bus},bus=pcie.0,numa_node={node}",
                    "-device", f"pcie-root-port,id=port{node},bus=bus{node},chassis={node + 1}",
                    "-device", f"bochs-display,bus=port{node}"]
    return [*options, "-device", "bochs-display,bus=pcie.0"]

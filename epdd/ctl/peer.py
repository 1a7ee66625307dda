"""Asks the kernel which user listens at the other end, before anything is sent there, above all an API key."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

from epdd import private

_CREDENTIALS = struct.Struct("3i")          # struct ucred: pid, uid, gid
_LISTENING = "0A"                           # in /proc/net/tcp


class Stranger(Exception):
    """Another user than the daemon's may be listening; the message says who and where."""


def connect(path: Path, timeout_s: float) -> tuple[socket.socket, int]:
    """A connection to a Unix socket, and the user who listens there: our own, root, or the owner of its folder.

    Raises Stranger, OSError.
    """
    place = private.danger(path.parent)
    if place:
        raise Stranger(f"{path}: {place}; nothing was sent.  Run epdctl as the daemon's user if it is the right one")
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in private.ours() | {os.stat(path.parent).st_uid}:
            raise Stranger(f"{path}: user {uid} listens there, neither you, root nor the folder's owner; nothing was "
                           "sent")
        return sock, uid
    except BaseException:
        sock.close()
        raise


def check_listener(sock: socket.socket, uid: int) -> None:
    """Raises Stranger unless `uid` (or root) listens at the address that this TCP connection goes to."""
    address, port = sock.getpeername()[:2]
    owners = _listeners(address, port)
    if not owners or not owners <= {uid, 0}:
        who = ", ".join(f"user {owner}" for owner in sorted(owners)) or "nobody on this machine"
        raise Stranger(f"{address} port {port}: {who} listens there, not the daemon (user {uid}); no API key was sent")


def _listeners(address: str, port: int) -> set[int]:
    """Users who listen on this address; if there is none, users who listen on all addresses."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, set[int]] = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:     # no IPv6
            continue
        for _, local, _, state, _, _, _, owner, *_ in map(str.split, lines):
            place, _, number = local.rpartition(":")
            if state == _LISTENING and int(number, 16) == port:
                found.setdefault(_address(place), set()).add(int(owner))
    every = found.get(ipaddress.ip_address("0.0.0.0"), set()) | found.get(ipaddress.ip_address("::"), set())
    return found.get(wanted) or every


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address of /proc/net/tcp: hexadecimal words of 32 bits in the byte order of the machine."""
    words = [int(text[at:at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))

"""The service manager's side channel: sd_notify(3) and sd_watchdog_enabled(3), without libsystemd."""

from __future__ import annotations

import os
import socket


def notify(**state: str | int) -> bool:
    """Send e.g. `notify(READY=1, STATUS="2 encoders")`.  False without a service manager that listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address[0] == "@":
        address = "\0" + address[1:]        # a name in the abstract namespace, not a file
    # One assignment is one line: a newline in a value would forge a second one.
    message = "\n".join(f"{key}={str(value).replace(chr(10), ' ')}" for key, value in state.items())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)         # a manager that does not read must not stop the daemon
            sock.sendto(message.encode(), address)
    except OSError:
        return False
    return True


def watchdog_interval() -> float | None:
    """Seconds between `notify(WATCHDOG=1)`: half the time after which systemd kills; None if it does not."""
    try:
        limit_us = int(os.environ.get("WATCHDOG_USEC", "0"))
        pid = int(os.environ.get("WATCHDOG_PID") or os.getpid())
    except ValueError:
        return None
    return limit_us / 2e6 if limit_us > 0 and pid == os.getpid() else None

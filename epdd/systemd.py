"""Messages to systemd: sd_notify(3) and sd_watchdog_enabled(3), without libsystemd."""

from __future__ import annotations

import os
import socket


def notify(**state: str | int) -> bool:
    """Send e.g. `notify(READY=1, STATUS="2 encoders")`.  Returns False if no service manager listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address[0] == "@":
        address = "\0" + address[1:]        # a name in the abstract namespace, not a file
    # One assignment is one line, so a value must not contain a newline.
    message = "\n".join(f"{key}={str(value).replace(chr(10), ' ')}" for key, value in state.items())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)         # if the manager does not read, the daemon must not wait
            sock.sendto(message.encode(), address)
    except OSError:
        return False
    return True


def watchdog_interval() -> float | None:
    """Seconds between `notify(WATCHDOG=1)`: half of WatchdogSec=; None if that is not set."""
    try:
        limit_us = int(os.environ.get("WATCHDOG_USEC", "0"))
        pid = int(os.environ.get("WATCHDOG_PID") or os.getpid())
    except ValueError:
        return None
    return limit_us / 2e6 if limit_us > 0 and pid == os.getpid() else None

"""How long a start takes and a killed worker is away: the daemon on its demo model, by wall clock.

    python tools/bench_start.py --kills 5

Prints seconds from the command to the first answer of /health and to READY, then for each worker the seconds
from kill -9 to READY again (median and worst of the kills), and the daemon's resident memory.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from epdd.ctl import client

PORT = 18765


def healthy():
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


def until(condition, limit_s=120):
    """Seconds until `condition()`; ends the program after the limit."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit_s:
            sys.exit(f"not within {limit_s} s")
        time.sleep(0.01)
    return time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of each worker")
    parser.add_argument("--model", help="checkpoint folder (default: the demo model)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "admin.sock"
        command = [sys.executable, "-m", "epdd", "--port", str(PORT), "--set", f"admin.socket={path}",
                   "--set", "log.level=error", *(["--model", args.model] if args.model else [])]
        daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            measure(path, args.kills)
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(30)


def measure(path, kills):
    def status():
        return client.ask(path, "status")

    health = until(healthy)
    ready = health + until(lambda: status()["state"] == "ready")
    print(f"start: /health after {health:.2f} s, READY after {ready:.2f} s")
    for name in [worker["name"] for worker in status()["workers"]]:
        def worker():
            return next(one for one in status()["workers"] if one["name"] == name)

        away = []
        for _ in range(kills):
            pid = worker()["pid"]
            os.kill(pid, signal.SIGKILL)
            away.append(until(lambda: worker()["state"] == "READY" and worker()["pid"] not in (pid, None)))
        print(f"{name}: READY again after {statistics.median(away):.2f} s (median of {kills}), worst {max(away):.2f} s")
    print(f"daemon: {status()['rss_bytes'] / 1e6:.1f} MB resident")


if __name__ == "__main__":
    main()

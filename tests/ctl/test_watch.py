import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

from rich.console import Console

from epdd.ctl.watch import screen
from tests.ctl.fake_daemon import FakeDaemon
from tests.ctl.snapshot import snapshot


def drawn(columns):
    console = Console(width=columns, height=50, record=True, file=open(os.devnull, "w"))
    console.print(screen(snapshot(), columns))
    return console.export_text().splitlines()


def test_one_frame_fits_its_terminal():
    lines = drawn(100)
    assert max(map(len, lines)) == 100
    assert any(re.search(r"pd/3 .* READY .* 812 tok/s .* ███████░  89%", line) for line in lines)
    assert any(re.search(r"encoder/3 .* weights 42% .* ███░░░░░  42%", line) for line in lines)
    assert any(re.search(r"encoder/0 .* READY .* █████░░░  67%", line) for line in lines)
    assert any(re.search(r"encoder/2 .* 3.1x slower .* █░░░░░░░  10%", line) for line in lines)
    assert any("! encoder/2 is 3.1x slower than at its start" in line for line in lines)
    assert any(re.search(r"arena +██████░░  75% 3 GiB of 4 GiB", line) for line in lines)
    assert not any("…" in line for line in lines)


def test_a_narrow_terminal_gets_fewer_columns():
    lines = drawn(80)
    assert max(map(len, lines)) == 80
    assert any(re.search(r"WORKER +DEVICE +NUMA +STATE +IN FLIGHT +RATE +SHARE/KV", line) for line in lines)
    assert not any("…" in line for line in lines)


def test_it_reconnects_and_leaves_on_ctrl_c(tmp_path):
    path = tmp_path / "admin.sock"
    ours, theirs = pty.openpty()
    watch = subprocess.Popen([sys.executable, "-m", "epdd.ctl.main", "--socket", str(path), "status", "--watch"],
                             stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    try:
        assert _shows(ours, "daemon not running")
        with FakeDaemon(path, {"status": snapshot()}):
            assert _shows(ours, "encoder/4")
        assert _shows(ours, "daemon not running")
        watch.send_signal(signal.SIGINT)
        assert _shows(ours, "\x1b[?25h")        # the cursor is back
        assert watch.wait(60) == 0
    finally:
        watch.kill()
        os.close(ours)


def _shows(terminal, text, timeout_s=120):      # hangs only
    seen, end = "", time.monotonic() + timeout_s
    while text not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 65536).decode(errors="replace")
            except OSError:             # the program closed its end
                break
    return text in seen

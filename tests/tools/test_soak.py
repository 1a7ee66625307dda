"""The short form of tools/soak: every fault that it knows at least once, the daemon killed under load, and hostile
clients beside honest ones."""

import subprocess
import sys

import pytest

from tests.e2e.daemon import ROOT

pytestmark = pytest.mark.takes(60)


def soak(*arguments):
    ended = subprocess.run([sys.executable, "-m", "tools.soak", *arguments], capture_output=True, text=True, cwd=ROOT,
                           timeout=400)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_under_faults_each_request_is_answered_once_and_nothing_is_left():
    told = soak("--seconds", "10", "--every", "1")
    assert "nothing was lost" in told and "`kill -9` of fork server and a worker" in told


@pytest.mark.slow
def test_a_killed_daemon_leaves_nothing_and_starts_clean():
    assert "nothing was lost" in soak("--daemon-kills", "2")


@pytest.mark.slow
def test_beside_hostile_clients_nothing_is_lost_or_wrong_and_nothing_is_left():
    """A short run checks neither times nor memory."""
    told = soak("--hostile", "--seconds", "16")
    assert "lost 0, wrong 0" in told and "nothing was lost" in told
    # Each of these came, and was refused, closed or held.
    for act in ("half a head", "stopped body", "silent connection", "JPEG of 3,000 scans", "wrong key", "noise",
                "broken-off upload", "broken-off stream", "reader that never reads"):
        assert f"| {act} |" in told, act

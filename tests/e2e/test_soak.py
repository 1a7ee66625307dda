"""The short form of tools/soak.py: every fault that it knows at least once, and the daemon killed under load."""

import subprocess
import sys

import pytest

from tests.e2e.daemon import ROOT


def soak(*arguments):
    ended = subprocess.run([sys.executable, "tools/soak.py", *arguments], capture_output=True, text=True, cwd=ROOT,
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

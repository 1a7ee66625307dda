"""The unit file as installed, under a real systemd: start, serve, reload, hang, misconfiguration, stop."""

import base64
import io
import json
import os
import re
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from tests.system import boot

pytestmark = [pytest.mark.slow, pytest.mark.takes(120)]

PYTHON = "/opt/epdd/venv/bin/python"
SETTINGS = "[arena]\nbytes = 67108864\n"
# By hand, since systemd knows no cpusets of version 1; test_numa.py has AllowedCPUs= and version 2.
CPUSETS = Path("/sys/fs/cgroup/cpuset")
HEALTH = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8765/health').read().decode())"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    reason = boot.missing()
    if reason:
        pytest.skip(f"no systemd container: {reason}")
    with boot.Machine(tmp_path_factory.mktemp("machine")) as booted:
        yield booted


@pytest.fixture
def service(machine):
    """The machine with the service running and untouched settings."""
    settings(machine, SETTINGS)
    machine.run("systemctl", "reset-failed", "epdd", check=False)
    machine.run("systemctl", "start", "epdd")
    return machine


def settings(machine, text):
    machine.run("mkdir", "-p", "/etc/epdd")
    machine.run("sh", "-c", f"cat > /etc/epdd/epdd.toml <<'END'\n{text}\nEND")


def epdctl(machine, *argv, check=True):
    environment = ("env", "PYTHONPATH=/opt/epdd/source", "LD_LIBRARY_PATH=/opt/epdd/python/lib")
    return machine.run(*environment, PYTHON, "-m", "epdd.ctl.main", *argv, check=check)


def red_square():
    file = io.BytesIO()
    Image.new("RGB", (96, 96), "red").save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def processes(machine):
    """How many processes run on the service's interpreter."""
    return int(machine.run("sh", "-c", "readlink /proc/[0-9]*/exe | grep -c /opt/epdd", check=False).stdout)


def wait_for(machine, wanted, *properties, timeout_s=60):
    end = time.monotonic() + timeout_s
    while machine.show(*properties) != wanted:
        assert time.monotonic() < end, f"{machine.show(*properties)}, not {wanted}\n{machine.journal()}"
        time.sleep(0.3)


def until(machine, condition, timeout_s=60):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, machine.journal()
        time.sleep(0.3)


def test_start_means_that_workers_serve(service):
    state, text, user = service.show("ActiveState", "StatusText", "User")
    assert (state, user) == ("active", "epdd")
    assert re.match(r"ready: 1/1 encoders, 1/1 PD", text)
    assert f'Status: "{text}"' in service.run("systemctl", "status", "epdd").stdout
    owner = service.run("stat", "-c", "%u", f"/proc/{service.show('MainPID')[0]}").stdout.strip()
    assert 61184 <= int(owner) <= 65519, "not one of systemd's dynamic users"


def test_it_serves(service):
    health = json.loads(service.run("env", "LD_LIBRARY_PATH=/opt/epdd/python/lib", PYTHON, "-c", HEALTH).stdout)
    assert health["status"] == "ok"
    status = json.loads(epdctl(service, "status", "--json").stdout)
    assert (status["state"], str(status["pid"])) == ("ready", service.show("MainPID")[0])
    for worker in status["workers"]:
        assert worker["cpus"] and worker["warning"] == ""       # the system call filter lets workers bind
    answer = epdctl(service, "chat", "-i", red_square(), "What colour is it?").stdout
    assert answer.strip()           # what it says is for the demo model's own tests


def test_reload_takes_new_settings_and_refuses_broken_ones(service):
    pid = service.show("MainPID")
    settings(service, SETTINGS + "[router]\npolicy = 'earliest'")
    service.run("systemctl", "reload", "epdd")
    wait_for(service, ["active"], "ActiveState")
    assert json.loads(epdctl(service, "status", "--json").stdout)["router"]["policy"] == "earliest"
    settings(service, SETTINGS + "[router]\npolicy = 'best'")
    assert service.run("systemctl", "reload", "epdd", check=False).returncode != 0
    wait_for(service, ["active"], "ActiveState")
    assert json.loads(epdctl(service, "status", "--json").stdout)["router"]["policy"] == "earliest"
    assert "router.policy is 'best'" in service.journal()
    assert service.show("MainPID") == pid


@contextmanager
def cpuset(machine, cpus):
    """The service's processes in a cpuset of version 1; yields the file that holds its CPUs."""
    group = CPUSETS / f"epdd-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpuset.mems").write_text((CPUSETS / "cpuset.mems").read_text())
        (group / "cpuset.cpus").write_text(cpus)
        for pid in machine.processes():
            (group / "cgroup.procs").write_text(str(pid))
        yield group / "cpuset.cpus"
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (CPUSETS / "cgroup.procs").write_text(pid)
        group.rmdir()


def wait_for_workers(machine, right):
    """Status once `right(status)` holds and all serve."""
    end = time.monotonic() + 60
    while True:
        status = json.loads(epdctl(machine, "status", "--json", check=False).stdout)     # 1: not ready
        if status["state"] == "ready" and right(status):
            return status
        assert time.monotonic() < end, f"{status}\n{machine.journal()}"
        time.sleep(0.5)


@pytest.mark.skipif(not (CPUSETS / "cpuset.cpus").exists(), reason="the kernel's cpusets are not of version 1")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_cpus_taken_away_while_running_are_noticed(service):
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    at_start = json.loads(epdctl(service, "status", "--json").stdout)["workers"]
    before = {worker["name"]: worker["cpus"] for worker in at_start}
    with cpuset(service, f"{first},{last}") as allowed:
        allowed.write_text(str(last))
        # The kernel removes the CPUs at once; the daemon then places the workers again.
        status = wait_for_workers(service, lambda status: status["placement"]["changes"])
        assert [worker["cpus"] for worker in status["workers"]] == [[last]] * len(at_start)
        assert all(change.endswith(f" to CPUs {last} of NUMA node 0") for change in status["placement"]["changes"])
        pids = {worker["name"]: worker["pid"] for worker in status["workers"]}
        stayed = [worker["name"] for worker in at_start if worker["cpus"] == [last]]
        assert all(pids[worker["name"]] == worker["pid"] for worker in at_start if worker["name"] in stayed)
        assert epdctl(service, "chat", "-i", red_square(), "What colour is it?").stdout.strip()
        allowed.write_text(f"{first},{last}")
        wait_for_workers(service, lambda status: len(status["placement"]["changes"]) > len(at_start) - len(stayed)
                         and {worker["name"]: worker["cpus"] for worker in status["workers"]} == before)
    assert f"epdd may use CPUs {last}, " in service.journal()


def test_the_units_memory_policy_reaches_the_workers(service):
    folder = "/run/systemd/system/epdd.service.d"
    service.run("mkdir", "-p", folder)
    service.run("sh", "-c", f"printf '[Service]\\nNUMAPolicy=bind\\nNUMAMask=0\\n' > {folder}/numa.conf")
    try:
        service.run("systemctl", "daemon-reload")
        service.run("systemctl", "restart", "epdd")
        workers = json.loads(epdctl(service, "status", "--json").stdout)["workers"]
        assert [(worker["mem_policy"], worker["warning"]) for worker in workers] == [("bind:0", "")] * len(workers)
    finally:
        service.run("rm", f"{folder}/numa.conf")
        service.run("systemctl", "daemon-reload")


def test_a_daemon_that_hangs_is_replaced(service):
    pid, restarts = service.show("MainPID", "NRestarts")
    service.run("sh", "-c", f"kill -STOP {pid}")
    wait_for(service, [str(int(restarts) + 1), "active"], "NRestarts", "ActiveState")
    assert service.show("MainPID") != [pid]
    assert "watchdog" in service.journal().lower()
    assert json.loads(epdctl(service, "status", "--json").stdout)["state"] == "ready"


def test_the_hardening_is_worth_what_we_say(service):
    told = service.run("systemd-analyze", "security", "epdd.service", "--no-pager", check=False).stdout
    score = float(re.search(r"Overall exposure level for epdd.service: ([0-9.]+)", told)[1])
    assert score < 2.5, told


def test_the_request_log_and_the_cache_have_their_folders(service):
    settings(service, SETTINGS + "[log]\nrequests = '/var/log/epdd/requests.jsonl'")
    service.run("systemctl", "restart", "epdd")
    epdctl(service, "chat", "-i", red_square(), "What colour is it?")
    path = "/var/log/epdd/requests.jsonl"
    end = time.monotonic() + 30
    while not (lines := service.run("cat", path, check=False).stdout.splitlines()):
        assert time.monotonic() < end, service.journal()
        time.sleep(0.3)
    line = json.loads(lines[0])
    assert (line["outcome"], line["status"], line["images"]) == ("completed", 200, 1)
    assert service.run("stat", "-L", "-c", "%a", path, "/var/log/epdd/").stdout.split() == ["600", "750"]
    # logrotate's way: the file is moved, the service reloaded.
    service.run("sh", "-c", f"mv -T {path} {path}-moved")
    service.run("systemctl", "reload", "epdd")
    epdctl(service, "chat", "What colour is it?")
    while not service.run("cat", path, check=False).stdout:
        assert time.monotonic() < end + 30, service.journal()
        time.sleep(0.3)
    pid = service.show("MainPID")[0]
    environment = service.run("cat", f"/proc/{pid}/environ").stdout.split("\0")
    assert "CACHE_DIRECTORY=/var/cache/epdd" in environment
    assert service.run("stat", "-L", "-c", "%a", "/var/cache/epdd").stdout.strip() == "750"


# A client's view of a crash: a stream that breaks.
IN_FLIGHT = """
import http.client, json, os, signal, sys
connection = http.client.HTTPConnection("127.0.0.1", 8765, timeout=60)
body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 4000, "ignore_eos": True}
connection.request("POST", "/v1/chat/completions", json.dumps(body))
answer = connection.getresponse()
first = answer.readline()
os.kill(int(sys.argv[1]), signal.SIGKILL)
try:
    rest = answer.read()
    print("ended", b"[DONE]" in rest)
except (http.client.IncompleteRead, ConnectionError) as error:
    print(answer.status, first[:6].decode(), type(error).__name__)
"""


def test_a_daemon_that_crashes_breaks_its_answers_and_comes_back(service):
    pid, restarts = service.show("MainPID", "NRestarts")
    seen = service.run("env", "LD_LIBRARY_PATH=/opt/epdd/python/lib", PYTHON, "-c", IN_FLIGHT, pid).stdout.split()
    assert seen[:2] == ["200", "data:"] and seen[2] in ("IncompleteRead", "ConnectionResetError"), seen
    wait_for(service, [str(int(restarts) + 1), "active"], "NRestarts", "ActiveState")
    assert service.show("MainPID") != [pid]
    assert epdctl(service, "chat", "-i", red_square(), "What colour is it?").stdout.strip()


def test_a_setting_that_cannot_work_is_not_tried_again(service):
    settings(service, SETTINGS + "[server]\nprot = 1")
    assert service.run("systemctl", "restart", "epdd", check=False).returncode != 0
    assert service.show("ActiveState", "ExecMainStatus", "NRestarts") == ["failed", "78", "0"]
    assert "unknown setting server.prot" in service.journal()


def test_a_port_that_is_taken_for_a_moment_is_tried_again(service):
    service.run("systemctl", "stop", "epdd")
    program = ("import pathlib, socket, time; s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(('127.0.0.1', 8765)); "
               "s.listen(); pathlib.Path('/run/taken').touch(); time.sleep(3600)")
    service.run("systemd-run", "--unit=other", "env", "LD_LIBRARY_PATH=/opt/epdd/python/lib", PYTHON, "-c", program)
    try:
        until(service, lambda: service.run("test", "-e", "/run/taken", check=False).returncode == 0)
        service.run("systemctl", "start", "--no-block", "epdd")
        until(service, lambda: "cannot listen on 127.0.0.1:8765" in service.journal()
              and "status=75" in service.journal())
        assert service.show("ActiveState")[0] == "activating"   # not failed: it is tried again
    finally:
        service.run("systemctl", "stop", "other", check=False)
    wait_for(service, ["active"], "ActiveState")


def test_stop_leaves_nothing(service):
    assert processes(service) >= 3              # daemon and two workers
    service.run("systemctl", "stop", "epdd")
    assert processes(service) == 0
    assert service.show("ActiveState", "Result", "ExecMainStatus") == ["inactive", "success", "0"]
    # One may be multiprocess's resource tracker, which ends by itself after the daemon.
    left = service.journal().rpartition("Stopping epdd")[2].count("SIGKILL")
    assert left <= 1, "the daemon left processes to systemd"
    assert service.run("ls", "-A", "/run").stdout.split().count("epdd") == 0

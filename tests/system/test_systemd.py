"""The unit file as installed, under a real systemd: start, serve, reload, hang, misconfiguration, stop."""

import base64
import io
import json
import re
import time

import pytest
from PIL import Image

from tests.system import boot

pytestmark = pytest.mark.slow

PYTHON = "/opt/epdd/venv/bin/python"
SETTINGS = "[arena]\nbytes = 67108864\n"
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


def epdctl(machine, *argv):
    environment = ("env", "PYTHONPATH=/opt/epdd/source", "LD_LIBRARY_PATH=/opt/epdd/python/lib")
    return machine.run(*environment, PYTHON, "-m", "epdd.ctl.main", *argv)


def red_square():
    file = io.BytesIO()
    Image.new("RGB", (96, 96), "red").save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def processes(machine):
    """How many run on our interpreter."""
    return int(machine.run("sh", "-c", "readlink /proc/[0-9]*/exe | grep -c /opt/epdd", check=False).stdout)


def wait_for(machine, wanted, *properties, timeout_s=60):
    end = time.monotonic() + timeout_s
    while machine.show(*properties) != wanted:
        assert time.monotonic() < end, f"{machine.show(*properties)}, not {wanted}\n{machine.journal()}"
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
    service.run("systemctl", "reload", "epdd")
    wait_for(service, ["active"], "ActiveState")
    assert json.loads(epdctl(service, "status", "--json").stdout)["router"]["policy"] == "earliest"
    assert "router.policy is 'best'" in service.journal()
    assert service.show("MainPID") == pid


def test_a_daemon_that_hangs_is_replaced(service):
    pid, restarts = service.show("MainPID", "NRestarts")
    service.run("sh", "-c", f"kill -STOP {pid}")
    wait_for(service, [str(int(restarts) + 1), "active"], "NRestarts", "ActiveState")
    assert service.show("MainPID") != [pid]
    assert "watchdog" in service.journal().lower()
    assert json.loads(epdctl(service, "status", "--json").stdout)["state"] == "ready"


def test_a_setting_that_cannot_work_is_not_tried_again(service):
    settings(service, SETTINGS + "[server]\nprot = 1")
    assert service.run("systemctl", "restart", "epdd", check=False).returncode != 0
    assert service.show("ActiveState", "ExecMainStatus", "NRestarts") == ["failed", "78", "0"]
    assert "unknown setting server.prot" in service.journal()


def test_stop_leaves_nothing(service):
    assert processes(service) >= 3              # daemon and two workers
    service.run("systemctl", "stop", "epdd")
    assert processes(service) == 0
    assert service.show("ActiveState", "Result", "ExecMainStatus") == ["inactive", "success", "0"]
    # One may be multiprocess's resource tracker, which ends by itself once it sees that the daemon is gone.
    left = service.journal().rpartition("Stopping epdd")[2].count("SIGKILL")
    assert left <= 1, "the daemon left processes to systemd"
    assert service.run("ls", "-A", "/run").stdout.split().count("epdd") == 0

"""The program of epdd.service in the machine of numa_machine.py: the daemon with workers without torch, which is too
slow there, and with display devices as GPUs.
"""

import sys

from epdd import daemon
from epdd.fleet.process import ForkServer
from epdd.ops.status import Status
from tests.system import numa_gpus


class StatusWithPlan(Status):
    """A worker's status with its plan beside its actual binding."""

    def _worker(self, worker):
        return super()._worker(worker) | {"planned_cpus": worker.spec.cpus, "planned_threads": worker.spec.threads}


def main():
    numa_gpus.install()
    daemon.ForkServer = lambda preload: ForkServer(["tests.system.numa_worker"], "tests.system.numa_worker")
    daemon.Status = StatusWithPlan
    sys.exit(daemon.main([]))

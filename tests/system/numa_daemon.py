"""What epdd.service runs in the machine of numa_machine.py: the daemon itself with workers that need no torch, which
is too slow there, and display devices as GPUs.
"""

import sys

from epdd import daemon
from epdd.fleet.process import ForkServer
from epdd.ops.status import Status
from tests.system import numa_gpus


class StatusWithPlan(Status):
    """Beside what is in force for a worker, what was planned for it."""

    def _worker(self, worker):
        return super()._worker(worker) | {"planned_cpus": worker.spec.cpus, "planned_threads": worker.spec.threads}


def main():
    numa_gpus.install()
    daemon.ForkServer = lambda preload: ForkServer(["tests.system.numa_worker"], "tests.system.numa_worker")
    daemon.Status = StatusWithPlan
    sys.exit(daemon.main([]))

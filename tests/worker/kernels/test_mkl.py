"""The first cosines of new processes with two threads, several processes at once, which showed MKL's race."""

from __future__ import annotations

import subprocess
import sys

PROCESSES = 6
PROGRAM = """
import torch
from epdd.worker.kernels import mkl

mkl.warm_up_vml()
torch.set_num_threads(2)
angles = torch.arange(784)[:, None] * torch.logspace(0, -4, 72) * 0.03
print(max(float((function(angles).double() - function(angles.double())).abs().max())
          for function in (torch.cos, torch.sin, torch.tanh)))
"""


def test_the_first_values_are_as_right_as_all_later_ones() -> None:
    running = [subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
               for _ in range(PROCESSES)]
    errors = [float(process.communicate(timeout=120)[0]) for process in running]
    assert max(errors) < 1e-6, errors

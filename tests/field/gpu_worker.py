"""A worker of gpu_daemon.py: the real one, on a fake device."""

import os
from pathlib import Path

import torch

from epdd.worker import bootstrap
from epdd.worker.kernels import cuda
from tests.field.gpu_daemon import FOLDER
from tests.worker.fake_cuda import FakeDevice

ERRORS = {"oom": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
          "assert": torch.AcceleratorError("CUDA error: device-side assert triggered")}


class FaultyDevice(FakeDevice):
    def synchronise(self, stream=None):
        super().synchronise(stream)
        for name, error in ERRORS.items():
            file = Path(os.environ[FOLDER]) / name
            if file.exists():
                now, *later = file.read_text()
                file.write_text("".join(later)) if later else file.unlink()
                if now == "x":
                    raise error


def main(spec, sock, arena):
    cuda.Device = FaultyDevice if spec.role == "encoder" else FakeDevice
    cuda.card = lambda name: "fake"
    bootstrap.main(spec, sock, arena)

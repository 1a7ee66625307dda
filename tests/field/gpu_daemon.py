"""The daemon with a fake GPU: its workers run on tests.worker.fake_cuda, and fail when a file says so.

Files in the folder of the admin socket: `oom` and `assert` hold a letter for each of the encoder's next waits for the
GPU, of which "x" raises that; `lost` makes the driver find the GPU gone.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from epdd import daemon
from epdd.fleet.process import ForkServer
from epdd.hardware import gpus
from epdd.hardware.topology import Gpu

FOLDER = "EPDD_TEST_FAULTS"
GPU = Gpu(0, "fake", 8 << 30, "0000:41:00.0", None, ())


def main(argv):
    folder = next(Path(word.partition("=")[2]).parent for word in argv if word.startswith("admin.socket="))
    os.environ[FOLDER] = str(folder)
    gpus.lost = lambda index: "GPU is lost" if (folder / "lost").exists() else ""
    probe = daemon.probe
    daemon.probe = lambda *args, **kwargs: replace(probe(*args, **kwargs), gpus=(GPU,))
    daemon.ForkServer = lambda preload: ForkServer([*preload, "tests.field.gpu_worker"], "tests.field.gpu_worker")
    sys.exit(daemon.main(argv))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Imported once by the fork server, so that a forked worker imports nothing heavy.

Owns the import of torch and of the served families' model code.  Starts no thread and makes no CUDA
context: both would not survive the fork.
"""

from __future__ import annotations

import atexit
import gc
import os
from contextlib import suppress
from importlib import import_module

# The fork server ends when the daemon does.  Taking torch apart would then take seconds; workers, which are its forks,
# leave by themselves and never come here.
atexit.register(os._exit, 0)

# Checkpoints are local folders: a look at the hub would only add its timeouts to a start without network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Asked whether there is a GPU, torch shall ask NVML: CUDA itself, started here, would not start in any fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# oneDNN keeps the code it makes for each matrix shape it meets, 0.6 MB each, and torch another 1,024 of them: workers
# that see every image size and batch grew by hundreds of MB.  Making one takes half a millisecond, so few will do: 32
# cost the demo model's prefill and decode no more CPU time than 1,024, at 22 MB instead of 490.
PRIMITIVES_KEPT = "32"
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", PRIMITIVES_KEPT)
os.environ.setdefault("LRU_CACHE_CAPACITY", PRIMITIVES_KEPT)

from epdd.families.registry import FAMILIES  # noqa: E402
from epdd.worker.language import cpu_runner, engine  # noqa: E402, F401
from epdd.worker.vision import encoder  # noqa: E402, F401

for kind in FAMILIES:
    with suppress(ImportError):     # a family that this version of transformers lacks: loading one says so
        import_module(f"transformers.models.{kind}.modeling_{kind}")

# All of this stays: without it a full collection in a worker takes half a second, in the middle of an answer,
# and writes to pages that all workers share.
gc.freeze()

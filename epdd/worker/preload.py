"""Imported once by the fork server, so that a forked worker imports nothing heavy.

Owns the import of torch and of the served families' model code.  Starts no thread and makes no CUDA
context: both would not survive the fork.
"""

from __future__ import annotations

import atexit
import os

# The fork server ends when the daemon does.  Taking torch apart would then take seconds; workers, which are its forks,
# leave by themselves and never come here.
atexit.register(os._exit, 0)

# Checkpoints are local folders: a look at the hub would only add its timeouts to a start without network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl  # noqa: E402, F401
from transformers.models.qwen2_vl import modeling_qwen2_vl  # noqa: E402, F401
from transformers.models.qwen3_vl import modeling_qwen3_vl  # noqa: E402, F401

from epdd.worker import encoder, engine  # noqa: E402, F401

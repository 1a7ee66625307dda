"""Encoding, prefill and decode on NVIDIA GPUs.

Attention by torch's flash kernel, decode steps recorded as CUDA graphs, norms in one kernel, and embeddings copied
from leases on a stream of their own.  Whatever does not work on a card or with a version of torch is left out at
warm-up, and torch's plain operators remain.
"""

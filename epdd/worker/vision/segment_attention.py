"""Attention of float32 rows within segments by the compiled kernel for AMX."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from epdd.worker.kernels import native
from epdd.worker.vision.grids import Segments


class Heads(ctypes.Structure):
    """Attention's operands as library.h has them."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "out")),
                *((name, ctypes.c_long) for name in ("query_stride", "key_stride", "value_stride", "count", "size",
                                                     "segments")),
                ("lengths", ctypes.c_void_p), ("scaling", ctypes.c_float)]


def attend_in(tower: Any) -> None:
    """Put `attend` into the blocks of a float32 vision tower."""
    for block in tower.blocks:
        block.attn.attend = functools.partial(attend, block.attn.scaling)


def attend(scaling: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           segments: Segments) -> torch.Tensor:
    """float32 [n, heads, head_dim] of each to the same shape, each segment to itself.

    Raises MemoryError, and RuntimeError on other rows than the segments'.
    """
    n, count, size = query.shape
    if query.dtype is not torch.float32 or sum(segments.lengths) != n:
        raise RuntimeError(f"{n} rows of {query.dtype} in segments of {sum(segments.lengths)} of float32")
    query, key, value = (x if x.stride()[1:] == (size, 1) else x.contiguous() for x in (query, key, value))
    out = torch.empty(n, count, size)
    lengths = segments.lengths_tensor
    heads = Heads(query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), query.stride(0), key.stride(0),
                  value.stride(0), count, size, len(lengths), lengths.data_ptr(), scaling)
    library = native.library()
    assert library is not None
    if n and not library.epdd_flash(ctypes.byref(heads)):
        raise MemoryError(f"no memory for attention of {n} rows")
    return out

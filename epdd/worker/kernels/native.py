"""The compiled kernels: a plain C library, built when epdd is installed, and absent where that failed.

Owns how it is found and called.  It computes in torch's own OpenMP threads: torch has to be imported first, and its
`set_num_threads` holds for both.  Products read their weights as they lie, whatever the number of rows, and give a row
the same bits in any batch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

log = logging.getLogger(__name__)

ROWS_MAX = 64       # library.h has it too; measured: with more rows, oneDNN's products are as fast or faster
MULTIPLE = 16       # of which sizes must be: floats in a vector
TYPES = (torch.float32, torch.bfloat16)
PATH = Path(__file__).with_name(f"_library{sysconfig.get_config_var('EXT_SUFFIX')}")


class Matrix(ctypes.Structure):
    """A linear layer as library.h has it."""

    _fields_ = [("weights", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("outputs", ctypes.c_long),
                ("inputs", ctypes.c_long)]

    @classmethod
    def of(cls, linear: nn.Linear) -> Matrix:
        """Points to the layer's weights, which must outlive it."""
        bias = None if linear.bias is None else linear.bias.data_ptr()
        return cls(linear.weight.data_ptr(), bias, linear.out_features, linear.in_features)


class RowPointers(ctypes.Structure):
    """`Rows` as library.h has it."""

    _fields_ = [("count", ctypes.c_long), ("slots", ctypes.c_void_p), ("starts", ctypes.c_void_p),
                ("lengths", ctypes.c_void_p)]


@dataclass(frozen=True)
class RowsTable:
    """A step's rows for the kernels."""

    pointers: RowPointers
    places: torch.Tensor        # int64 [3, T], what the pointers point to


def rows(slots: list[int], starts: list[int], lengths: list[int]) -> RowsTable | None:
    """Rows that go to these slots of the KV pool and attend to `lengths` tokens from `starts` on, their own the last.

    None where the kernels cannot take them.
    """
    if len(slots) > ROWS_MAX or library() is None:
        return None
    places = torch.tensor([slots, starts, lengths])
    at, step = places.data_ptr(), places.stride(0) * places.element_size()
    return RowsTable(RowPointers(len(slots), at, at + step, at + 2 * step), places)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, where it was built and this CPU can run it."""
    try:
        found = ctypes.CDLL(str(PATH))
    except OSError as error:
        log.info("no compiled kernels: %s", error)
        return None
    found.epdd_instructions.restype = ctypes.c_char_p
    found.epdd_prefer.argtypes = [ctypes.c_char_p]
    found.epdd_linear.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    found.epdd_layer.argtypes = [ctypes.c_void_p] * 6
    found.epdd_experts.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_long] * 2, *[ctypes.c_void_p] * 2]
    found.epdd_gemm.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
    found.epdd_flash.argtypes = [ctypes.c_void_p]
    found.epdd_fp8.argtypes = [ctypes.c_void_p, *[ctypes.c_long] * 2, ctypes.c_void_p, *[ctypes.c_long] * 3,
                               ctypes.c_void_p, ctypes.c_int]
    return found if found.epdd_instructions() else None


def advice() -> str:
    """What an operator can do if the library was not built and could be; empty otherwise."""
    if PATH.exists() or platform.machine() not in ("x86_64", "AMD64"):
        return ""
    return ("no compiled kernels, so CPUs decode at about half the speed; install a C++ compiler (Debian: apt install "
            "g++) and install epdd again, as `make serve` does")


def instructions() -> str:
    """The instruction set that the kernels use; empty without kernels."""
    found = library()
    return "" if found is None else str(found.epdd_instructions().decode())


def takes(linear: nn.Linear) -> bool:
    """Whether the kernels can multiply by it."""
    weight = linear.weight
    return (weight.device.type == "cpu" and weight.dtype in TYPES and weight.is_contiguous()
            and linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0)


class FewRowsLinear(nn.Module):  # type: ignore[misc]
    """Replaces an nn.Linear: the kernels compute few rows, in float32 sums and results, the original more."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.original = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._matrix, self._half = Matrix.of(linear), int(linear.weight.dtype == torch.bfloat16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, in_features] to [T, out_features]."""
        kernels = library()
        if kernels is None or rows.ndim != 2 or not 0 < len(rows) <= ROWS_MAX:
            return self.original(rows)
        rows = rows.contiguous()
        out = torch.empty(len(rows), self.out_features)
        kernels.epdd_linear(ctypes.byref(self._matrix), self._half, rows.data_ptr(), out.data_ptr(), len(rows))
        return out

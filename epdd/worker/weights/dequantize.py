"""Dequantised weights of a checkpoint, for transformers to load like any others.

transformers' own quantisers need further packages, and compute with FP8 kernels or in copies of the whole model.  Here
each FP8 matrix is read in bands of a few rows, multiplied by its scales and written to its place.  So besides the
result only the bands in work take memory.  Weights that are not quantised stay file pages.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ctypes import CDLL
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from epdd.checkpoint.headers import Tensor
from epdd.checkpoint.quantization import Quantization, Scale
from epdd.errors import ModelError
from epdd.worker.kernels import native

# Numbers in a band.  torch starts its threads for more than this, and here are threads already.
BAND = 32767
# An E4M3 number's bits, moved to where float16 has sign, exponent and mantissa, are the number divided by 2 ** 8, for
# the exponents' biases are 7 and 15; that holds for subnormal ones too.  NaN is the one that would become a number.
SHIFT, WITHOUT_COPIED_SIGN, UNBIAS = 7, ~0x4000, 256.0
NAN = 0x7F


@contextmanager
def weights(tensors: Mapping[str, Tensor], quantization: Quantization, dtype: torch.dtype,
            wanted: Callable[[str], bool]) -> Iterator[dict[str, torch.Tensor]]:
    """A state dict of the tensors with `wanted` names: FP8 matrices in `dtype`, all others as they are stored.

    Raises ModelError for a file that ends early, or holds NaN in a matrix or its scales, OSError where a file cannot be
    read.
    """
    chosen = {name: tensor for name, tensor in tensors.items()
              if wanted(name) and name not in quantization.extra}
    with ExitStack() as stack:
        files = {tensor.file: stack.enter_context(tensor.file.open("rb", buffering=0)).fileno()
                 for tensor in tensors.values()}
        mapped = {path: stack.enter_context(safe_open(path, "pt")) for path in {t.file for t in chosen.values()}}
        state = {name: mapped[tensor.file].get_tensor(name) for name, tensor in chosen.items()
                 if name not in quantization.scales}
        with ThreadPoolExecutor(torch.get_num_threads(), "weights") as threads:
            made = {name: threads.submit(_dequantised, name, tensor, quantization.scales[name], tensors, files, dtype)
                    for name, tensor in chosen.items() if name in quantization.scales}
            try:
                state |= {name: future.result() for name, future in made.items()}
            finally:
                threads.shutdown(cancel_futures=True)
        yield state


def _dequantised(name: str, tensor: Tensor, scale: Scale, tensors: Mapping[str, Tensor], files: Mapping[Path, int],
                 dtype: torch.dtype) -> torch.Tensor:
    rows, columns = tensor.shape
    out = _fresh(rows, columns, dtype)
    scales = _read_scales(tensors[scale.name], files).view(-(-rows // scale.rows), -(-columns // scale.columns))
    if not scales.isfinite().all():
        raise ModelError(f"{tensor.file}: {scale.name} holds NaN or infinity; download the file again")
    height = max(1, min(rows, BAND // columns))
    stored = np.empty((height, columns), np.int8)
    kernels = native.library() if dtype in native.TYPES else None
    convert = _by_torch if kernels is None else partial(_by_kernel, kernels)
    for top in range(0, rows, height):
        count = min(height, rows - top)
        _read(tensor, files, stored[:count], top * columns)
        if convert(stored[:count], scales, scale, top, out[top:top + count]):
            raise ModelError(f"{tensor.file}: {name} holds NaN; download the file again")
    return out


# Rows `stored` of a matrix from `top` on, times its scales, to `out`.  Each says whether one of them is NaN.

def _by_kernel(kernels: CDLL, stored: NDArray[np.int8], scales: torch.Tensor, scale: Scale, top: int,
               out: torch.Tensor) -> bool:
    return bool(kernels.epdd_fp8(stored.ctypes.data, *stored.shape, scales.data_ptr(), scale.rows, scale.columns, top,
                                 out.data_ptr(), int(out.dtype == torch.bfloat16)))


def _by_torch(stored: NDArray[np.int8], scales: torch.Tensor, scale: Scale, top: int, out: torch.Tensor) -> bool:
    bits = torch.from_numpy(stored.astype(np.int16))
    band = bits.bitwise_left_shift_(SHIFT).bitwise_and_(WITHOUT_COPIED_SIGN).view(torch.float16).float()
    _multiply(band, scales[torch.arange(top, top + len(stored)) // scale.rows] * UNBIAS, scale.columns)
    out.copy_(band)
    return bool(np.bitwise_and(stored, NAN).max() == NAN)


def _multiply(band: torch.Tensor, scales: torch.Tensor, width: int) -> None:
    """In place.  `scales` has the band's rows, and a column for each `width` of its; the last may be narrower."""
    whole = band.shape[1] // width
    band[:, :whole * width].unflatten(1, (whole, width)).mul_(scales[:, :whole, None])
    if whole < scales.shape[1]:
        band[:, whole * width:].mul_(scales[:, whole:])


def _read_scales(tensor: Tensor, files: Mapping[Path, int]) -> torch.Tensor:
    """In float32, in one row."""
    stored = np.empty(tensor.end - tensor.start, np.int8)
    _read(tensor, files, stored, 0)
    kind = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[tensor.dtype]
    return torch.from_numpy(stored).view(kind).to(torch.float32, copy=True)


def _read(tensor: Tensor, files: Mapping[Path, int], into: NDArray[np.int8], offset: int) -> None:
    # By copying, not by a mapping: its pages would count as this process's memory until all is loaded.
    view, at = into.reshape(-1), tensor.start + offset
    while view.size:
        got = os.preadv(files[tensor.file], [view.data], at)
        if not got:
            raise ModelError(f"{tensor.file}: ends early; download it again")
        view, at = view[got:], at + got


def _fresh(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of its own, in huge pages if the kernel has them: touching small pages takes longer than all the rest."""
    if not rows * columns:
        return torch.empty(rows, columns, dtype=dtype)
    memory = mmap.mmap(-1, rows * columns * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass        # a kernel without them
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)

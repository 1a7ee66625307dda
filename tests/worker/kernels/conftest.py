"""Each set of instructions, and numbers of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epdd.worker.kernels import native


@pytest.fixture(params=["AMX", "AVX-512", "AVX2"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each set of instructions that this CPU has."""
    library = native.library()
    assert library is not None
    library.epdd_prefer(request.param.encode())
    if library.epdd_instructions().decode() != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    library.epdd_prefer(b"")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)

"""Mixtures of experts by the kernels against transformers' own module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

from epdd.worker.kernels import experts, native

pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels were not compiled")
COUNT, EACH, HIDDEN, INNER = 12, 3, 208, 112
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def made(dtype: torch.dtype, inner: int = INNER) -> Any:
    config = Qwen3VLMoeTextConfig(hidden_size=HIDDEN, head_dim=16, moe_intermediate_size=inner, num_experts=COUNT)
    module = Qwen3VLMoeTextExperts(config).requires_grad_(False)
    torch.manual_seed(0)
    for weights in (module.gate_up_proj, module.down_proj):
        weights.normal_(0.0, weights.shape[-1] ** -0.5)
    return module.to(dtype)


def drawn(rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the experts that each chose, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(COUNT, generator=generator)[:EACH] for _ in range(rows)])
    return (torch.randn(rows, HIDDEN, generator=generator).to(dtype), chosen,
            torch.rand(rows, EACH, generator=generator).to(dtype))


def exact(module: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """In float64: all experts for all rows, most of them with weight zero."""
    shares = torch.zeros(len(rows), COUNT + 1, dtype=torch.float64).scatter_(1, chosen, weights.double())
    out = torch.zeros(rows.shape, dtype=torch.float64)
    for number in range(COUNT):
        gate, up = (rows.double() @ module.gate_up_proj[number].double().T).chunk(2, -1)
        out += shares[:, number, None] * ((torch.nn.functional.silu(gate) * up) @ module.down_proj[number].double().T)
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 2, 5, 17, 64, 65, 300])
def test_the_sum_of_the_chosen_ones(instructions: str, threads: int, dtype: torch.dtype, rows: int) -> None:
    module, given = made(dtype), drawn(rows, dtype)
    wanted = exact(module, *given)
    found = experts.forward(module, *given)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=TOLERANCE[dtype] * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_in_any_company(instructions: str, threads: int, dtype: torch.dtype) -> None:
    module, (rows, chosen, weights) = made(dtype), drawn(64, dtype)
    alone = torch.cat([experts.forward(module, rows[i:i + 1], chosen[i:i + 1], weights[i:i + 1]) for i in range(64)])
    for first, last in ((0, 64), (7, 12), (40, 64), (63, 64)):
        part = slice(first, last)
        assert torch.equal(experts.forward(module, rows[part], chosen[part], weights[part]), alone[part])


@pytest.mark.parametrize("rows", [4, 70])
def test_all_rows_may_choose_one_and_some_none(instructions: str, rows: int) -> None:
    module, (states, chosen, weights) = made(torch.float32), drawn(rows, torch.float32)
    chosen[:, 0] = 5
    chosen[:, 1] = 6
    chosen[:, 2] = COUNT            # no expert
    wanted = exact(module, states, chosen, weights)
    torch.testing.assert_close(experts.forward(module, states, chosen, weights).double(), wanted, rtol=1e-4, atol=1e-4)


def test_what_the_kernels_do_not_know_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (made(torch.float32, inner=24), made(torch.float32)):
        if module.down_proj.shape[2] == INNER:
            module.act_fn = torch.nn.GELU()
        given = drawn(3, torch.float32)
        wanted = type(module).forward.__wrapped__(module, *given)
        assert torch.equal(experts.forward(module, *given), wanted)
    module = made(torch.float32)
    assert experts.error(module) < 1e-5
    monkeypatch.setattr(native, "library", lambda: None)
    assert experts.error(module) == 0

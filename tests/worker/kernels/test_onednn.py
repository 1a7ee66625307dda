from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from epdd.worker.kernels import onednn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 70), nn.GELU(), nn.Sequential(nn.Linear(70, 30, bias=False), nn.LayerNorm(30)))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_values_stay_the_same_for_any_number_of_rows(dtype: torch.dtype, tolerance: float) -> None:
    plain = network().to(dtype)
    packed = copy.deepcopy(plain)
    onednn.pack(packed)
    assert sum(isinstance(m, onednn.PackedLinear) for m in packed.modules()) == 2
    assert not [m for m in packed.modules() if isinstance(m, nn.Linear)]
    with torch.inference_mode():
        for shape in ((1, 40), (7, 40), (1, 300, 40), (2, 3, 40)):
            rows = torch.randn(shape).to(dtype)
            torch.testing.assert_close(packed(rows), plain(rows), atol=tolerance, rtol=tolerance)


def test_a_tied_weight_stays_whole() -> None:
    table = nn.Embedding(50, 40)
    head = nn.Linear(40, 50, bias=False)
    head.weight = table.weight
    wanted = table.weight.clone()
    model = nn.ModuleDict({"table": table, "head": head})
    onednn.pack(model)
    assert torch.equal(table.weight, wanted)
    with torch.inference_mode():
        torch.testing.assert_close(model["head"](torch.ones(3, 40)), torch.ones(3, 40) @ wanted.T)


def test_layers_stay_where_the_operator_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, linear: nn.Linear) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(onednn.PackedLinear, "__init__", refuse)
    model = network()
    onednn.pack(model)
    assert sum(isinstance(m, nn.Linear) for m in model.modules()) == 2

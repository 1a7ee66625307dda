from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest
import torch
from torch import nn

from epdd.worker.kernels import gemm_bf16x3
from epdd.worker.kernels.onednn import PackedLinear
from epdd.worker.vision.backends import amx, choice, cosine, cpu, relative_error
from tests.models import checkpoints
from tests.worker.vision.test_tower import loaded


@pytest.mark.parametrize("family", checkpoints.TOWERS)
def test_prepacked_planes_are_those_of_plain_torch(checkpoint: Callable[..., str], family: str) -> None:
    made = loaded(checkpoint(family))
    batch = choice.probe(made, 64)
    wanted = made(*batch)
    found = cpu.Prepacked().prepare(made)(*batch)
    assert relative_error(found, wanted) < 1e-5
    assert not any(isinstance(part, nn.Linear) for part in made.module.modules())
    fused = [part.activation for part in made.module.modules()
             if isinstance(part, PackedLinear) and part.activation != "none"]
    # Qwen2-VL's activation is none that oneDNN knows.
    assert fused == {"qwen3_vl": ["gelu"] * 4, "qwen2_5_vl": ["swish"] * 4}.get(family, [])


@pytest.mark.skipif(gemm_bf16x3.missing() != "", reason=gemm_bf16x3.missing())
@pytest.mark.parametrize("family", checkpoints.TOWERS)
def test_planes_by_amx_are_those_of_plain_torch(checkpoint: Callable[..., str], family: str) -> None:
    made = loaded(checkpoint(family))
    batch = choice.probe(made, 64)
    wanted = made(*batch)
    assert amx.Amx().missing(made) == ""
    found = amx.Amx().prepare(made)(*batch)
    assert relative_error(found, wanted) < 5e-6
    assert not any(isinstance(part, nn.Linear) for part in made.module.modules())
    activated = [part.activation.name for part in made.module.blocks.modules()
                 if isinstance(part, gemm_bf16x3.ManyRowsLinear) and part.activation]
    assert activated == {"qwen3_vl": ["GELU_TANH"] * 4, "qwen2_5_vl": ["SILU"] * 4}.get(family, [])


def test_amx_is_for_float32(checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(checkpoint("qwen3_vl"))
    monkeypatch.setattr(gemm_bf16x3, "missing", lambda: "this CPU has no AMX")
    assert amx.Amx().missing(made) == "this CPU has no AMX"
    made.dtype = torch.bfloat16
    assert amx.Amx().missing(made) == "not for bfloat16"


@pytest.mark.parametrize("family", checkpoints.TOWERS)
def test_int8_planes_are_near_and_pixels_are_not_quantised(checkpoint: Callable[..., str], family: str) -> None:
    made = loaded(checkpoint(family))
    batch = choice.probe(made, 64)
    wanted = made(*batch)
    found = cpu.Int8().prepare(made)(*batch)
    assert 0.99 < cosine(found, wanted) < 0.999999
    assert cpu.Int8().refusal(found, wanted) == ""
    for part in (made.module.blocks, made.module.merger):
        kinds = {type(module) for module in part.modules()}
        assert cpu.Int8Linear in kinds and not {nn.Linear, PackedLinear} & kinds
    assert isinstance(made.module.patch_embed.product, PackedLinear | nn.Linear)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-2), (torch.bfloat16, 3e-2)])
def test_int8_rows_have_their_own_scales(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 40).to(dtype).requires_grad_(False)
    rows = torch.randn(3, 7, 96).to(dtype)
    rows[0, 0] *= 1000          # one row stands out, one is empty
    rows[0, 1] = 0
    wanted, found = plain(rows), cpu.Int8Linear(plain)(rows)
    assert found.dtype == dtype and found.shape == wanted.shape
    errors = (found - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)
    assert errors.max() < tolerance


def test_what_is_off_is_refused_with_its_number() -> None:
    wanted = [torch.ones(4, 8), torch.ones(4, 8)]
    off = [torch.ones(4, 8), torch.full((4, 8), 1.001)]
    assert cpu.Plain().refusal(wanted, wanted) == ""
    assert cpu.Plain().refusal(off, wanted) == "off by 1.0e-03 of the embedding, 1e-04 allowed"
    assert cpu.Int8().refusal(off, wanted) == ""
    turned = [torch.ones(4, 8), torch.ones(4, 8) * torch.tensor([1.0, -1.0] * 4)]
    assert cpu.Int8().refusal(turned, wanted) == "cosine 0.0000, at least 0.99 needed"
    broken = [torch.ones(4, 8), torch.full((4, 8), float("nan"))]
    assert cpu.Plain().refusal(broken, wanted) and cpu.Int8().refusal(broken, wanted)


def test_an_extension_for_another_torch_is_never_imported(checkpoint: Callable[..., str],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(checkpoint("qwen3_vl"))
    monkeypatch.setattr(metadata, "version", lambda name: "2.8.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert cpu.Ipex().missing(made) == "version 2.8.0 does not fit torch 2.13.0+cpu"

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert cpu.Ipex().missing(made) == "not installed"

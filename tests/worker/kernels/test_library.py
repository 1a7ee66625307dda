"""The compiled kernels against torch and transformers; without them torch computes the same."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from epdd.worker.kernels import experts, native
from epdd.worker.language import attention, cpu_layer, kv_cache
from epdd.worker.language.scheduler import BLOCK_SIZE
from epdd.worker.weights import load
from tests.models import checkpoints
from tests.worker.language import pd

built = pytest.mark.skipif(native.library() is None, reason="the kernels were not compiled when epdd was installed")
CPU = torch.device("cpu")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are for x86-64")
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler")
def test_it_is_there_where_a_compiler_is() -> None:
    """Else the tests below are skipped, and sources that do not compile go unnoticed."""
    assert native.PATH.exists()


def linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


@built
@pytest.mark.parametrize("rows", [*range(1, 18), 31, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_torchs(instructions: str, dtype: torch.dtype, rows: int) -> None:
    """With and without bias; outputs that no block of rows divides."""
    for inputs, outputs, bias in ((16, 16, False), (272, 144, True), (640, 1008, False)):
        plain = linear(inputs, outputs, bias, dtype)
        assert native.takes(plain)
        x = torch.randn(rows, inputs).to(dtype)
        wanted = x.double() @ plain.weight.double().T + (plain.bias.double() if bias else 0.0)
        torch.testing.assert_close(native.FewRowsLinear(plain)(x).double(), wanted, rtol=1e-5, atol=1e-5)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(instructions: str, threads: int, dtype: torch.dtype) -> None:
    swapped = native.FewRowsLinear(linear(272, 1008, True, dtype))
    x = torch.randn(64, 272, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([swapped(row[None]) for row in x])
    torch.set_num_threads(threads)
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 17, 63, 64):
        assert torch.equal(swapped(x[:count]), alone[:count]), count
        assert torch.equal(swapped(x[-count:]), alone[-count:]), count


def test_what_the_kernels_cannot_take_is_left_to_torch() -> None:
    assert not native.takes(nn.Linear(40, 64)) and not native.takes(nn.Linear(64, 40))
    assert not native.takes(nn.Linear(64, 64, dtype=torch.float16))
    assert native.rows([0] * 65, [0] * 65, [1] * 65) is None
    plain = linear(64, 64, True, torch.float32)
    many, deep = torch.randn(65, 64), torch.randn(1, 3, 64)
    assert torch.equal(native.FewRowsLinear(plain)(many), plain(many))
    assert torch.equal(native.FewRowsLinear(plain)(deep), plain(deep))


class Two:
    """A family's second decoder layer, as transformers has it and by the kernels, each with a KV pool of its own."""

    def __init__(self, folder: str, dtype: str, kv_dtype: torch.dtype) -> None:
        text = load.load_language(folder, dtype, "cpu", attention.NAME).get_decoder()
        self.rotary, self.original = text.rotary_emb, text.layers[1]
        self.pools = [kv_cache.KVPool(text.config, 4096, kv_dtype, CPU) for _ in range(2)]
        self.layer = cpu_layer.Layer(self.original, *self.pools[0].layer(1))
        self.hidden = text.config.hidden_size
        self.dtype = getattr(torch, dtype)

    @torch.inference_mode()
    def run(self, chunks: list[tuple[int, int, int]], states: torch.Tensor,
            positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, hidden] by the kernels and by transformers."""
        plan = attention.plan(chunks, CPU)
        angles = self.rotary(states, torch.tensor(positions).expand(3, 1, -1))
        assert plan.rows is not None
        found = self.layer(states[None], angles, plan)
        wanted = self.original(states[None], position_embeddings=angles, attention_mask=None, plan=plan,
                               cache=self.pools[1].at(plan.slots))
        return found[0], wanted[0]

    def fill(self, tokens: int) -> None:
        """The same random keys and values in both pools."""
        for i in range(2):
            rows = torch.randn(self.pools[0].layer(1)[i][:, :tokens].shape, generator=torch.Generator().manual_seed(i))
            for pool in self.pools:
                pool.layer(1)[i][:, :tokens] = rows

    def states(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.hidden, generator=torch.Generator().manual_seed(5)).to(self.dtype)


@built
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_transformers(checkpoint: Callable[..., str], instructions: str, family: str,
                                 kv_dtype: torch.dtype) -> None:
    """One token after nothing and after long ones, just below and above the kernels' spans, and a chunk of 5."""
    two = Two(checkpoint(family), "float32", kv_dtype)
    two.fill(4096)
    chunks = [(1, 0, 0), (1, 64, 510), (1, 640, 511), (1, 1280, 512), (5, 1856, 1030), (1, 3008, 1023)]
    positions = [past + i for count, _, past in chunks for i in range(count)]
    found, wanted = two.run(chunks, two.states(10), positions)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    for mine, theirs in zip(two.pools[0].layer(1), two.pools[1].layer(1)):
        torch.testing.assert_close(mine, theirs, rtol=1e-2 if kv_dtype is torch.bfloat16 else 1e-4, atol=1e-5)


@built
def test_a_layer_in_bfloat16_is_as_near_as_its_digits(checkpoint: Callable[..., str], instructions: str) -> None:
    two = Two(checkpoint("qwen3_vl", dtype="bfloat16"), "bfloat16", torch.bfloat16)
    two.fill(1024)
    found, wanted = two.run([(1, 0, 40), (1, 64, 600), (2, 700, 1)], two.states(4), [40, 600, 1, 2])
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0.03 * float(wanted.abs().max()))


@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layers_rows_have_the_same_bits_in_any_company(checkpoint: Callable[..., str], instructions: str,
                                                         threads: int, dtype: str) -> None:
    two = Two(checkpoint("qwen3_vl", dtype=dtype), dtype, getattr(torch, dtype))
    two.fill(4096)
    chunks = [(1, 64 * i, 7 * i % 60) for i in range(40)] + [(1, 2600, 1400)]
    states, positions = two.states(41), [past for _, _, past in chunks]
    torch.set_num_threads(1)
    alone = [two.run([chunks[i]], states[i:i + 1], positions[i:i + 1])[0] for i in range(41)]
    torch.set_num_threads(threads)
    for first, last in ((0, 41), (30, 41), (37, 41), (3, 19)):
        together, _ = two.run(chunks[first:last], states[first:last], positions[first:last])
        assert torch.equal(together, torch.cat(alone[first:last])), (first, last)


def language(folder: str) -> Any:
    return load.load_language(folder, "float32", "cpu", attention.NAME)


@built
def test_a_model_is_exchanged_only_where_its_layers_come_out_right(
        checkpoint: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    model = language(checkpoint("qwen3_vl"))
    pool = kv_cache.KVPool(model.get_decoder().config, 1024, torch.float32, CPU)
    first = model.get_decoder().layers[0]
    first.mlp.act_fn = nn.GELU()        # not what the kernels compute
    assert not cpu_layer.install(model, pool) and "not used" in caplog.text
    first.mlp.act_fn = nn.SiLU()
    first.self_attn.o_proj = nn.Sequential(first.self_attn.o_proj)
    assert not cpu_layer.install(model, pool)
    first.self_attn.o_proj = first.self_attn.o_proj[0]
    assert model.get_decoder().layers[0] is first
    assert cpu_layer.install(model, pool)
    assert all(isinstance(one, cpu_layer.Layer) for one in model.get_decoder().layers)
    assert isinstance(model.get_output_embeddings(), native.FewRowsLinear)


@built
def test_experts_that_come_out_wrong_keep_the_model_as_it_is(
        checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = language(checkpoint("qwen3_vl_moe"))
    pool = kv_cache.KVPool(model.get_decoder().config, 1024, torch.float32, CPU)
    dense, sparse = model.get_decoder().layers[:2]
    assert not hasattr(dense.mlp, "experts") and hasattr(sparse.mlp, "experts")
    right = experts.forward
    monkeypatch.setattr(experts, "forward", lambda *given: 1.01 * right(*given))
    assert not cpu_layer.install(model, pool) and "not used" in caplog.text
    monkeypatch.setattr(experts, "forward", right)
    assert cpu_layer.install(model, pool)
    assert [one.original for one in model.get_decoder().layers[:2]] == [dense, sparse]


@built
def test_weights_are_not_copied(checkpoint: Callable[..., str]) -> None:
    bench = pd.Bench(checkpoint("qwen3_vl"))
    model = bench.runner.language.model
    weights = {p.data_ptr() for p in model.parameters()}
    for exchanged in model.get_decoder().layers:
        shape = exchanged._shape
        for matrix in (shape.q, shape.k, shape.v, shape.o, shape.gate, shape.up, shape.down):
            assert matrix.weights in weights
    assert not any("Packed" in type(module).__name__ for module in model.modules())


def test_without_kernels_the_answers_are_the_same_and_an_operator_is_told(
        checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_vl")
    prompts = [pd.prompt(folder, [9], 1), pd.prompt(folder, [90], 2)]
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "PATH", tmp_path / "not built")
    bench = pd.Bench(folder)
    told = bench.engine.warm_up(lambda done: None).warning
    assert "CPUs decode at about half the speed" in told and "apt install g++" in told
    for i, prompt in enumerate(prompts):
        bench.submit(str(i), prompt)
    answers = bench.run()
    assert bench.runner.kernels is False
    for i, prompt in enumerate(prompts):
        assert answers[str(i)] == checkpoints.reference_generate(folder, prompt.tokens, [], 12)


@built
def test_logits_do_not_depend_on_the_company(checkpoint: Callable[..., str]) -> None:
    """Also if other prompts are computed in the same steps."""
    folder = checkpoint("qwen3_vl")
    logprobs = []
    for crowd in (0, 5):
        bench = pd.Bench(folder, max_batched_tokens=96)
        bench.submit("x", pd.prompt(folder, [40], 1), max_tokens=30, ignore_eos=True, logprobs=4)
        bench.engine.step()
        for i in range(crowd):
            bench.submit(str(i), pd.prompt(folder, [150], 10 + i), max_tokens=5)
        bench.run()
        logprobs.append([m.logprobs for m in bench.of("x") if isinstance(m, pd.wire.Tokens)])
    assert len(logprobs[0]) == 30 and logprobs[0] == logprobs[1]


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=built), False])
def test_keys_and_values_in_half_the_memory(checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
                                            kernels: bool) -> None:
    folder = checkpoint("qwen3_vl")
    if not kernels:
        monkeypatch.setattr(native, "library", lambda: None)
    found = {}
    for kv_dtype in ("auto", "bfloat16"):
        bench = pd.Bench(folder, kv_tokens=0, kv_bytes=1 << 20, kv_dtype=kv_dtype)
        bench.submit("x", pd.prompt(folder, [80, checkpoints.picture(60, 40), 30], 1), max_tokens=2, logprobs=0)
        bench.run()
        found[kv_dtype] = SimpleNamespace(
            tokens=bench.engine._scheduler.capacity, dtype=bench.runner.memory.layer(0)[0].dtype,
            logprobs=[m.logprobs[0].logprob for m in bench.of("x") if isinstance(m, pd.wire.Tokens)])
    assert found["bfloat16"].tokens // BLOCK_SIZE == 2 * found["auto"].tokens // BLOCK_SIZE
    assert (found["auto"].dtype, found["bfloat16"].dtype) == (torch.float32, torch.bfloat16)
    assert found["bfloat16"].logprobs[0] == pytest.approx(found["auto"].logprobs[0], abs=0.1)
    assert found["bfloat16"].logprobs[0] != found["auto"].logprobs[0]

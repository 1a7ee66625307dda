from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from epdd.worker.gpu import flash
from epdd.worker.language import attention, kv_cache
from epdd.worker.language.scheduler import BLOCK_SIZE

CPU = torch.device("cpu")


def here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@settings(max_examples=60)
@given(sequences=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 150)), min_size=1, max_size=6),
       order=st.randoms(use_true_random=False), heads=st.sampled_from([(2, 2), (6, 2), (4, 1)]))
def test_a_plan_says_to_the_kernel_what_attention_by_sequence_computes(
        sequences: list[tuple[int, int]], order: object, heads: tuple[int, int]) -> None:
    """Extents of (rows, tokens before) in any order in the pool, decode rows first or not."""
    query_heads, kv_heads = heads
    config = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=kv_heads, head_dim=8)
    target = kv_cache.KVPool(config, 24 * BLOCK_SIZE, torch.float32, CPU)
    names = list(range(len(sequences)))
    order.shuffle(names)                            # type: ignore[attr-defined]
    for name in names:
        target.reserve(str(name), sum(sequences[name]))
    layout = [(count, target.offset(str(i)), past) for i, (count, past) in enumerate(sequences)]
    rows = sum(count for count, _ in sequences)
    query, key, value = (torch.randn(1, n, rows, 8) for n in (query_heads, kv_heads, kv_heads))
    for keys in (*target._keys, *target._values):
        keys.normal_()
    ours, theirs = flash.plan(layout, flash.by_sequence, here), attention.plan(layout, CPU)
    assert torch.equal(ours.slots, theirs.slots)
    keys, values = target.at(ours.slots).update(key, value, 0)
    wanted, _ = attention.attend(None, query, keys, values, None, 0.3, theirs)
    found, _ = flash.attend(None, query, keys, values, None, 0.3, ours)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert flash.attend(None, query, keys, values, None, 0.3, theirs)[0].equal(wanted)


def test_decode_rows_go_apart_from_chunks() -> None:
    plan = flash.plan([(1, 640, 70), (1, 0, 5), (130, 128, 64), (1, 320, 3)], flash.by_sequence, here)
    decoding, chunks = plan.parts
    assert (decoding.row, decoding.rows, decoding.chunk_max, decoding.length_max) == (0, 2, 1, 71)
    assert decoding.firsts.tolist() == [0, 1, 2] and decoding.lengths.tolist() == [71, 6]
    assert decoding.offsets.tolist()[:2] == [640, 0] and len(decoding.offsets) == 3
    assert (chunks.row, chunks.rows, chunks.chunk_max, chunks.length_max) == (2, 131, 130, 194)
    assert chunks.firsts.tolist() == [0, 130, 131] and chunks.lengths.tolist() == [194, 4]
    for part in plan.parts:
        for numbers in (part.firsts, part.offsets, part.lengths):
            assert numbers.dtype == torch.int32 and numbers.is_contiguous()


def wrong_where_rows_are_many(*args: object) -> torch.Tensor:
    out = flash.by_sequence(*args)      # type: ignore[arg-type]
    part = args[3]
    assert isinstance(part, flash.FlashCall)
    if part.chunk_max == 1:
        return out
    return torch.cat((out[:-1], torch.full_like(out[-1:], float("nan"))))


def not_there(*args: object) -> torch.Tensor:
    raise AttributeError("_flash_attention_forward")


def other_arguments(*args: object) -> torch.Tensor:
    raise TypeError("unexpected keyword seqused_k")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_kernel_that_is_there_and_right_is_chosen(dtype: torch.dtype) -> None:
    kernels = {"gone": not_there, "changed": other_arguments, "wrong": wrong_where_rows_are_many,
               "right": flash.by_sequence}
    chosen = flash.choose(4, 2, 16, dtype, CPU, kernels)
    assert chosen == ("right", flash.by_sequence)
    del kernels["right"]
    assert flash.choose(4, 2, 16, dtype, CPU, kernels) is None


def test_torchs_kernels_refuse_a_cpu_without_harm() -> None:
    assert flash.choose(4, 2, 16, torch.bfloat16, CPU) is None


def test_the_operator_has_the_arguments_that_we_name() -> None:
    """epdd depends on a private operator's names and order only; shapes are tried on the meta device."""
    names = [argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert names[:10] == ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
                          "return_debug_mask"]
    assert {"scale", "seqused_k"} <= set(names[10:])
    part = flash.plan([(1, 64, 9), (1, 0, 3)], flash.operator, lambda tensor: tensor.to("meta")).parts[0]
    query = torch.empty(2, 4, 16, dtype=torch.bfloat16, device="meta")
    pool = torch.empty(2, 128, 16, dtype=torch.bfloat16, device="meta").transpose(0, 1)
    assert flash.operator(query, pool, pool, part, 0.25).shape == query.shape
    assert flash.public(query, pool, pool, part, 0.25).shape == query.shape

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings, strategies as st

from epdd.worker.language import attention, kv_cache
from epdd.worker.language.scheduler import BLOCK_SIZE

CONFIG = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=2, head_dim=4)


def pool(units: int) -> kv_cache.KVPool:
    return kv_cache.KVPool(CONFIG, units * BLOCK_SIZE, torch.float32, torch.device("cpu"))


def write(target: kv_cache.KVPool, owner: str, start: int, rows: torch.Tensor) -> None:
    """Store [T, 4] as keys (and negated as values) of both heads and layers."""
    plan = attention.plan([(len(rows), target.offset(owner), start)], torch.device("cpu"))
    heads = rows[None, None].expand(1, 2, -1, -1)
    for layer in range(2):
        target.at(plan.slots).update(heads * (layer + 1), -heads * (layer + 1), layer)


def read(target: kv_cache.KVPool, owner: str, length: int) -> torch.Tensor:
    none = torch.zeros(1, 2, 0, 4)
    keys, values = target.at(torch.zeros(0, dtype=torch.long)).update(none, none, 1)
    found = keys[:, target.offset(owner):target.offset(owner) + length] / 2
    assert torch.equal(values[:, target.offset(owner):target.offset(owner) + length], -found * 2)
    assert torch.equal(found[0], found[1])
    return found[0]


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert kv_cache.bytes_per_token(CONFIG, torch.bfloat16) == 2 * 2 * 2 * 4 * 2


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=40))
def test_content_survives_growing_moving_and_spreading(steps: list[tuple[int, int]]) -> None:
    """Each step lets an owner grow by some units, or lets go of it where the pool is full."""
    units = 12
    target, content = pool(units), dict[str, torch.Tensor]()
    for number, more in steps:
        owner = str(number)
        held = content.get(owner, torch.zeros(0, 4))
        if sum(len(rows) for rows in content.values()) + more * BLOCK_SIZE > units * BLOCK_SIZE:
            target.release(owner)
            content.pop(owner, None)
        else:
            target.reserve(owner, len(held) + more * BLOCK_SIZE)
            fresh = torch.randn(more * BLOCK_SIZE, 4)
            write(target, owner, len(held), fresh)
            content[owner] = torch.cat([held, fresh])
        for name, rows in content.items():
            assert torch.equal(read(target, name, len(rows)), rows)


def test_attention_equals_dense_attention_over_each_sequence() -> None:
    torch.manual_seed(0)
    target = pool(32)
    lengths = {"a": (70, 1), "b": (0, 50), "c": (90, 30), "d": (5, 1), "e": (0, 300),
               "f": (40, 600)}     # computed before, rows of this batch
    pasts = {}
    for owner, (past, count) in lengths.items():
        target.reserve(owner, past + count)
        pasts[owner] = torch.randn(past, 4)
        write(target, owner, 0, pasts[owner])
    plan = attention.plan([(count, target.offset(o), past) for o, (past, count) in lengths.items()],
                          torch.device("cpu"))
    rows = sum(count for _, count in lengths.values())
    query, fresh = torch.randn(1, 6, rows, 4), torch.randn(rows, 4)
    heads = fresh[None, None].expand(1, 2, -1, -1)
    keys, values = target.at(plan.slots).update(heads, -heads, 0)
    out, _ = attention.attend(None, query, keys, values, None, 0.5, plan)
    row = 0
    for owner, (past, count) in lengths.items():
        k = torch.cat([pasts[owner], fresh[row:row + count]])
        scores = query[0, :, row:row + count] @ k.T * 0.5
        scores = scores.masked_fill(~torch.ones(count, past + count, dtype=torch.bool).tril(past), float("-inf"))
        torch.testing.assert_close(out[0, row:row + count].transpose(0, 1), scores.softmax(-1) @ -k,
                                   atol=1e-5, rtol=1e-5)
        row += count

"""Images' rows in a step's input, for images in several runs and chunks that end anywhere."""

from __future__ import annotations

from typing import Any, cast

import torch
from hypothesis import given, settings, strategies

from epdd import wire
from epdd.families.image_tokens import Expansion
from epdd.worker.language import batch_inputs
from epdd.worker.language.batch_inputs import HostRows
from epdd.worker.language.model_runner import PromptSequence
from epdd.worker.language.scheduler import Batch

IMAGE, HIDDEN, PLANES = 7, 2, 3

IDS = strategies.lists(strategies.sampled_from([IMAGE, IMAGE, 1]), min_size=1, max_size=12).filter(
    lambda ids: IMAGE in ids)
# Between two images lies text, of no token at all too.
PROMPTS = strategies.lists(strategies.tuples(strategies.integers(0, 3), IDS), max_size=4)


def span(start: int, ids: list[int]) -> wire.Span:
    return wire.Span(start, ids.count(IMAGE), (1, 1, 1), wire.Lease(0, 1), "float32", "",
                     Expansion.of(ids, IMAGE).runs)


@given(ids=IDS)
def test_the_runs_of_an_expansion_are_its_image_tokens(ids: list[int]) -> None:
    runs = Expansion.of(ids, IMAGE).runs
    assert (runs == ()) == (set(ids) == {IMAGE})
    found = span(0, ids)
    places = [start + i for start, count in found.places for i in range(count)]
    assert places == [i for i, token in enumerate(ids) if token == IMAGE]
    assert found.end == places[-1] + 1
    # Neighbouring runs are one.
    assert all(second > first + count for (first, count), (second, _) in zip(runs, runs[1:]))


@settings(max_examples=200, deadline=None)
@given(prompts=strategies.lists(PROMPTS, min_size=1, max_size=3), data=strategies.data())
def test_each_row_lands_where_its_image_token_is(prompts: list[list[tuple[int, list[int]]]],
                                                 data: strategies.DataObject) -> None:
    chunks, wanted, masks = [], [], []
    for number, parts in enumerate(prompts):
        tokens: list[int] = []
        images: list[HostRows] = []
        rows = torch.zeros(0, PLANES, HIDDEN)
        for text, ids in parts:
            placed = span(len(tokens) + text, ids)
            planes = torch.rand(PLANES, placed.rows, HIDDEN) + 1
            images.append(HostRows(placed.places, planes))
            rows = torch.cat((rows, planes.transpose(0, 1)))
            tokens += [1] * text + ids
        tokens.append(1)
        full = torch.zeros(len(tokens), PLANES, HIDDEN)
        is_image = torch.tensor(tokens) == IMAGE
        full[is_image] = rows
        start = data.draw(strategies.integers(0, len(tokens) - 1))
        count = data.draw(strategies.integers(1, len(tokens) - start))
        request = cast(Any, PromptSequence)(
            id=str(number), message=None, tokens=tokens, prompt=len(tokens), tenant="", total_max=len(tokens) + 1,
            stop_ids=frozenset(), leases_until=len(tokens))
        request.images, request.computed = images, start
        chunks.append((request, count))
        wanted.append(full[start:start + count])
        masks.append(is_image[start:start + count])
        for image in images:
            low, high = batch_inputs.rows_within(image.places, start, start + count)
            within = [start <= place + i < start + count for place, n in image.places for i in range(n)]
            assert within == [low <= i < high for i in range(len(within))]
    embeds = torch.zeros(sum(count for _, count in chunks), HIDDEN)
    made = batch_inputs.splice(Batch(chunks), embeds)
    rows, mask = torch.cat(wanted), torch.cat(masks)
    assert torch.equal(embeds, rows[:, 0])
    if mask.any():
        assert torch.equal(made["visual_pos_masks"][0], mask)
        assert torch.equal(torch.stack(made["deepstack_visual_embeds"]), rows[mask][:, 1:].transpose(0, 1))
    else:
        assert made == {}

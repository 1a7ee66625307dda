"""Decode graphs with a recorder that replays calls on the same buffers."""

from __future__ import annotations

import pytest
import torch

from epdd.worker.gpu import flash, graphs
from tests.worker.fake_cuda import FakeDevice

CPU = torch.device("cpu")


class Model:
    """Records its arguments; its "logits" are the ids, the sum of positions and the layout."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor,
                 plan: flash.FlashPlan) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(len(ids))
        part, = plan.parts
        assert part.chunk_max == 1 and part.length_max == 640
        assert part.firsts.tolist() == list(range(len(ids) + 1)) and len(part.offsets) == len(ids) + 1
        logits = torch.stack((ids, positions.sum(0), plan.slots, part.lengths, part.offsets[:-1]), 1).float()
        return torch.stack((ids.float(), ids.float())), logits


def recorded(model: Model, sizes_max: int, sizes: tuple[int, ...] = graphs.SIZES) -> graphs.Graphs:
    return graphs.Graphs(model, flash.by_sequence, FakeDevice().capture, sizes_max, 640, CPU, lambda t: t, sizes)


def test_a_batch_takes_the_next_larger_graph_and_gets_its_own_rows_back() -> None:
    model = Model()
    made = recorded(model, 12)
    assert made.sizes == (1, 2, 4, 8, 12)
    assert made.fits(12) and not made.fits(13)
    for count, size in ((1, 1), (2, 2), (3, 4), (5, 8), (9, 12), (12, 12), (3, 4)):
        model.calls.clear()
        ids = [100 * count + i for i in range(count)]
        positions = torch.arange(3 * count).view(3, count)
        layout = [(1, 64 * (count - i), 7 * i) for i in range(count)]
        best, logits = made.run(ids, positions, layout)
        assert model.calls == [size]
        assert best.tolist() == [[float(i) for i in ids]] * 2
        assert logits.tolist() == [[ids[i], int(positions[:, i].sum()), offset + past, past + 1, offset]
                                   for i, (_, offset, past) in enumerate(layout)]


def test_rows_left_over_write_where_the_first_row_does() -> None:
    seen: list[torch.Tensor] = []

    def compute(ids: torch.Tensor, positions: torch.Tensor,
                plan: flash.FlashPlan) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(torch.stack((ids, *positions, plan.slots, plan.parts[0].lengths, plan.parts[0].offsets[:-1])))
        return ids.expand(2, -1).float(), ids[:, None].float()

    made = graphs.Graphs(compute, flash.by_sequence, FakeDevice().capture, 8, 640, CPU, lambda t: t, (8,))
    made.run([5, 6, 7], torch.arange(9).view(3, 3), [(1, 128, 70), (1, 0, 1), (1, 64, 2)])
    assert torch.equal(seen[-1][:, 3:], seen[-1][:, :1].expand(-1, 5))
    assert seen[-1][:, 0].tolist() == [5, 0, 3, 6, 198, 71, 128]


def test_what_cannot_be_recorded_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    def record(step: object) -> object:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    made = graphs.Graphs(Model(), flash.by_sequence, record, 4, 640, CPU, lambda t: t)  # type: ignore[arg-type]
    assert made.sizes == () and not made.fits(1)
    assert "4 sequences run without a graph: operation not permitted when stream is capturing" in caplog.text

"""Products and attention in float32 by AMX, against the same in float64: as near as torch's own."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional

from epdd.worker.kernels import gemm_bf16x3
from epdd.worker.kernels.gemm_bf16x3 import Activation
from epdd.worker.vision import segment_attention
from epdd.worker.vision.grids import Segments, segments

pytestmark = pytest.mark.skipif(gemm_bf16x3.missing() != "", reason=gemm_bf16x3.missing())

# Norm of the error over the norm of the result.  Without the last of the three parts it is 1e-5.
NEAR = 1e-6
DONE = {Activation.NONE: lambda rows: rows, Activation.SILU: functional.silu,
        Activation.GELU_TANH: lambda rows: functional.gelu(rows, approximate="tanh")}


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


# Rows and outputs beside multiples of a block, columns of one block, of several, and with a rest; more rows than are
# held at a time.
@pytest.mark.parametrize("rows, inputs, outputs", [
    (1, 32, 16), (3, 8, 5), (31, 33, 31), (32, 64, 32), (65, 588, 129), (100, 1152, 40), (70, 1184, 33), (40, 3420, 65),
    (1700, 96, 48), (70, 1300, 300)])
@pytest.mark.parametrize("activation", Activation)
def test_products_are_float32s(threads: int, rows: int, inputs: int, outputs: int, activation: Activation) -> None:
    for bias in (False, True):
        plain = linear(inputs, outputs, bias)
        given_rows = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
        wanted = given_rows.double() @ plain.weight.double().T + (plain.bias.double() if bias else 0.0)
        found = gemm_bf16x3.ManyRowsLinear(plain, activation)(given_rows)
        for row, (one, other) in enumerate(zip(found, DONE[activation](wanted))):
            assert error(one, other) < NEAR or other.norm() < 1e-30, row


def test_a_row_has_the_same_bits_in_any_company(threads: int) -> None:
    swapped = gemm_bf16x3.ManyRowsLinear(linear(1300, 144))
    rows = torch.randn(1600, 1300)
    whole = swapped(rows)
    assert torch.equal(swapped(rows[:37]), whole[:37]) and torch.equal(swapped(rows[999:1099]), whole[999:1099])
    torch.set_num_threads(threads % 5 + 1)
    assert torch.equal(swapped(rows), whole)


def test_rows_may_lie_in_any_shape() -> None:
    plain = linear(48, 80)
    swapped = gemm_bf16x3.ManyRowsLinear(plain)
    torch.testing.assert_close(swapped(torch.ones(2, 3, 48)), plain(torch.ones(2, 3, 48)))
    turned = torch.randn(48, 7).T
    torch.testing.assert_close(swapped(turned), plain(turned))
    assert swapped(torch.empty(0, 48)).shape == (0, 80)


def test_sums_of_equal_terms_do_not_drift() -> None:
    """The parts are rounded, not truncated: with truncation this would be 4.7e-7."""
    plain = linear(1024, 32, bias=False)
    number = 1 + 2 ** -7 - 2 ** -23         # truncated parts would all be below it
    plain.weight.fill_(number)
    found = gemm_bf16x3.ManyRowsLinear(plain)(torch.full((40, 1024), number))
    assert error(found, torch.full((40, 32), 1024 * number ** 2, dtype=torch.float64)) < 3.5e-7


def test_what_is_not_float32_is_refused() -> None:
    with pytest.raises(RuntimeError):
        gemm_bf16x3.ManyRowsLinear(linear(64, 64).to(torch.bfloat16))
    swapped = gemm_bf16x3.ManyRowsLinear(linear(64, 64))
    for rows in (torch.randn(5, 100), torch.randn(5, 64).to(torch.bfloat16)):
        with pytest.raises(RuntimeError):
            swapped(rows)
    with pytest.raises(RuntimeError):
        segment_attention.attend(1.0, *torch.randn(50, 3, 2, 72).unbind(1), of_lengths(50, 1))


def test_what_is_no_number_stays_with_its_row() -> None:
    swapped = gemm_bf16x3.ManyRowsLinear(linear(64, 64))
    rows = torch.randn(40, 64)
    sound = swapped(rows)
    rows[7, 3] = math.nan
    spoiled = swapped(rows)
    assert spoiled[7].isnan().all()
    assert torch.equal(torch.cat([spoiled[:7], spoiled[8:]]), torch.cat([sound[:7], sound[8:]]))


def of_lengths(*lengths: int) -> Segments:
    return segments(torch.tensor([0, *lengths]).cumsum(0), torch.device("cpu"))


def attended(joint: torch.Tensor, lengths: tuple[int, ...], scaling: float) -> torch.Tensor:
    """In float64 and step by step."""
    pieces = []
    for piece in joint.double().split(lengths):
        query, key, value = piece.permute(1, 2, 0, 3)
        pieces.append((torch.softmax(query @ key.mT * scaling, -1) @ value).transpose(0, 1))
    return torch.cat(pieces)


# Head sizes of whole and half tiles and of neither; windows, one segment for all threads together, and few and many.
@pytest.mark.parametrize("heads, size, lengths", [
    (2, 72, (5,)), (3, 80, (64, 64, 10, 33, 200)), (2, 64, (300,)), (1, 16, (1, 40, 100)), (1, 128, (129,)),
    (2, 40, (70, 70)), (1, 24, (64,)), (16, 72, (196, 196)), (2, 72, (1500,)), (1, 80, (2000, 3))])
def test_attention_is_float32s(threads: int, heads: int, size: int, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(size)
    joint = torch.randn(sum(lengths), 3, heads, size)
    joint[:, 0] *= 3        # some keys stand out
    found = segment_attention.attend(size ** -0.5, *joint.unbind(1), of_lengths(*lengths))
    wanted = attended(joint, lengths, size ** -0.5)
    for one, other in zip(found.split(lengths), wanted.split(lengths)):
        assert error(one, other) < NEAR


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5), size=st.integers(1, 9).map(lambda n: 8 * n),
       strength=st.sampled_from([0.0, 1.0, 100.0]), seed=st.integers(0, 9))
def test_any_segments_attend_to_themselves(lengths: list[int], size: int, strength: float, seed: int) -> None:
    torch.manual_seed(seed)
    joint = torch.randn(sum(lengths), 3, 2, size)
    joint[:, 0] *= strength     # all weights alike, or nearly one key's alone
    found = segment_attention.attend(1.0, *joint.unbind(1), of_lengths(*lengths))
    # Scores of some thousand are right to a hundred-thousandth, and so are weights then.
    assert error(found, attended(joint, tuple(lengths), 1.0)) < (NEAR if strength <= 1 else 3e-5)


def test_an_image_with_nan_leaves_the_others_alone() -> None:
    joint = torch.randn(150, 3, 2, 72)
    sound = segment_attention.attend(0.1, *joint.unbind(1), of_lengths(50, 100))
    joint[3, 2, 1, 9] = math.nan
    spoiled = segment_attention.attend(0.1, *joint.unbind(1), of_lengths(50, 100))
    assert spoiled[:50, 1, 9].isnan().all() and torch.equal(spoiled[50:], sound[50:])

from __future__ import annotations

from dataclasses import replace

import pytest

from epdd import families
from epdd.families import files
from epdd.families.layers import Keeps, LayerKind, Positions


def test_the_demo_keeps_keys_and_values_of_all_tokens_in_all_layers() -> None:
    info = families.load(str(families.DEMO))
    config = files.Fields(families.DEMO / "config.json").part("text_config")
    numbers = 2 * config.whole("num_key_value_heads") * config.whole("head_dim")
    assert info.layers == (LayerKind(Keeps.FULL, numbers),) * config.whole("num_hidden_layers")
    assert info.positions is Positions.MROPE and not info.bidirectional_images


@pytest.mark.parametrize("layers, numbers", [
    ((), 0),
    ((LayerKind(Keeps.FULL, 10), LayerKind(Keeps.FULL, 30)), 40),
    ((LayerKind(Keeps.FULL, 10), LayerKind(Keeps.WINDOW, 10, window=8), LayerKind(Keeps.STATE, state_numbers=5)), 10),
    ((LayerKind(Keeps.FULL, 10), LayerKind(Keeps.FULL, 10, shares=0)), 10)])
def test_only_layers_of_full_attention_with_keys_of_their_own_count_for_each_token(
        layers: tuple[LayerKind, ...], numbers: int) -> None:
    assert replace(families.load(str(families.DEMO)), layers=layers).kv_numbers == numbers

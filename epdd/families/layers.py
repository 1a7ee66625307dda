"""What the layers of a language model keep of a sequence, and how its tokens are numbered: data, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Keeps(Enum):
    """The kind of a layer's memory."""

    FULL = "full attention"             # keys and values of all tokens
    WINDOW = "sliding window"           # keys and values of the latest `window` tokens
    STATE = "recurrent state"           # one state of fixed size, replaced at each token


class Positions(Enum):
    """How rotary positions number the tokens of a prompt."""

    PLAIN = "plain"                     # 0, 1, 2, ... for text and images alike
    MROPE = "m-rope"                    # three numbers: time, row and column of an image's patches


@dataclass(frozen=True)
class LayerKind:
    """What one layer keeps.  Numbers, not bytes: keys and values have the dtype of the KV cache."""

    keeps: Keeps = Keeps.FULL
    token_numbers: int = 0      # FULL, WINDOW: numbers in keys and values of one token, both counted
    window: int = 0             # WINDOW: tokens that a token attends to, itself included
    state_numbers: int = 0      # STATE: numbers in the state of one sequence, convolutions included
    shares: int | None = None   # reads keys and values of this earlier layer and keeps none of its own; None: its own

    @property
    def own_numbers(self) -> int:
        """Numbers that it adds to each token's memory."""
        return 0 if self.shares is not None else self.token_numbers


def full_attention(layers: int, token_numbers: int) -> tuple[LayerKind, ...]:
    """The description of a model whose layers all keep all keys and values."""
    return (LayerKind(Keeps.FULL, token_numbers),) * layers

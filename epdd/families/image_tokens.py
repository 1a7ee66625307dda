"""The tokens that stand for an image in a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Grid = tuple[int, int, int]
Run = tuple[int, int]           # (offset, count) of image tokens that follow each other


@dataclass(frozen=True)
class Expansion:
    """The ids that replace an image's placeholder, and where the image tokens are among them."""

    ids: Sequence[int]
    runs: tuple[Run, ...] = ()      # offsets into `ids`; (): all of them are image tokens

    @classmethod
    def of(cls, ids: Sequence[int], image_token_id: int) -> Expansion:
        """With the runs of `image_token_id` in `ids`."""
        runs, at = [], 0
        for is_image, group in itertools.groupby(ids, image_token_id.__eq__):
            count = sum(1 for _ in group)
            if is_image:
                runs.append((at, count))
            at += count
        return cls(ids, () if runs == [(0, len(ids))] else tuple(runs))

# SPDX-License-Identifier: Apache-2.0
"""The units of an item (image, crops, frames), and the bounds on the size of each one's anchor."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from anchorprune_vllm import budget
from anchorprune_vllm.anchor_params import AnchorParams
from anchorprune_vllm.selection.types import Candidates


class Unit(NamedTuple):
    """A unit that has an anchor: the range of its tokens, and the bounds on the anchor's size."""

    start: int  # the index of its first token in the item
    size: int
    minimum: int  # K_min, at least 1
    maximum: int  # K_max, from `minimum` to `size`

    @property
    def tokens(self) -> slice:
        """Return the range of the unit's tokens in its item."""
        return slice(self.start, self.start + self.size)


def anchored_units(item: Candidates, params: AnchorParams) -> list[Unit]:
    """Return the units of an item that have an anchor: those with a share of the budget."""
    if item.units is None:
        sizes = [len(item.features)]
    else:
        sizes = [len(list(group)) for _, group in groupby(item.units.tolist())]
    units = []
    start = 0
    for size, share in zip(sizes, budget.unit_budgets(item.kept, sizes), strict=True):
        minimum = budget.min_anchor(share)
        if params.min_anchor is not None:
            minimum = min(params.min_anchor, share)
        maximum = budget.max_anchor(share, minimum, params.max_anchor_ratio)
        if share:
            units.append(Unit(start, size, minimum, maximum))
        start += size
    return units

# SPDX-License-Identifier: Apache-2.0
"""Controls that use no signals: random tokens, tokens on a grid, and the first tokens."""

from __future__ import annotations

import torch

from anchorprune_vllm.budget import unit_budgets
from anchorprune_vllm.methods.ranking import count, in_native_order
from anchorprune_vllm.methods.registry import method
from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.selection.types import Candidates, KeptTokens


@method()
def random_tokens(item: Candidates, *, seed: int = 0) -> KeptTokens:
    """Select K random tokens, which depend only on the media and the seed."""
    chance = torch.Generator().manual_seed((item.seed ^ seed) % 2**63)
    chosen = torch.randperm(len(item.features), generator=chance)[: count(item)]
    return in_native_order(to_device(chosen, item.features.device))


@method()
def uniform_grid(item: Candidates) -> KeptTokens:
    """Select K tokens spread evenly over units, over the rows of a unit, and within each row."""
    grids = item.grids or ((1, len(item.features)),)
    sizes = [rows * columns for rows, columns in grids]
    chosen: list[int] = []
    start = 0
    for (rows, columns), share in zip(grids, unit_budgets(count(item), sizes), strict=True):
        if share:
            # Use as many rows as make vertical and horizontal steps alike, but enough to hold all.
            wanted = round((share * rows / columns) ** 0.5)
            used = min(max(1, wanted, -(-share // columns)), rows, share)
            for line, row in enumerate(_spread(used, rows)):
                in_row = share * (line + 1) // used - share * line // used
                chosen += [start + row * columns + place for place in _spread(in_row, columns)]
        start += rows * columns
    return in_native_order(to_device(chosen, item.features.device))


@method()
def first_tokens(item: Candidates) -> KeptTokens:
    """Select the first K tokens, which shows the cost of pruning without that of selection."""
    return in_native_order(torch.arange(count(item), device=item.features.device))


def _spread(count: int, places: int) -> list[int]:
    """Return the middles of `count` equal parts of a line of `places` places."""
    return [(2 * number + 1) * places // (2 * count) for number in range(count)]

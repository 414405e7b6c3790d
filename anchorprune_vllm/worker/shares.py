# SPDX-License-Identifier: Apache-2.0
"""Selection from items whose units have fixed shares of the budget.

Where text stands among the embeddings of an item (such as tags of tiles), the prompt determines how
many embeddings each unit keeps before any is selected. Each such unit is selected from separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anchorprune_vllm.selection import Candidates, KeptTokens

Select = Callable[[Sequence[Candidates]], list[KeptTokens]]


def select_with_shares(
    select: Select, items: Sequence[Candidates], shares: Sequence[Sequence[int]]
) -> list[KeptTokens]:
    """Select from all items, and from each unit that has a share of its own, in one call.

    `shares` has, for each item, the number of tokens to keep of each unit; a single number means
    that the budget of the item is not divided.
    """
    parts: list[Candidates] = []
    starts: list[list[int]] = []
    for item, kept in zip(items, shares, strict=True):
        if len(kept) == 1:
            parts.append(item)
            starts.append([0])
        else:
            units, firsts = _units_with_a_share(item, kept)
            parts += units
            starts.append(firsts)
    selected = iter(select(parts))
    return [
        _joined([next(selected) for _ in firsts], firsts, len(item.features))
        for item, firsts in zip(items, starts, strict=True)
    ]


def _units_with_a_share(
    item: Candidates, kept: Sequence[int]
) -> tuple[list[Candidates], list[int]]:
    """Return the units that keep any tokens as items of their own, and each one's first token."""
    units, firsts, start = [], [], 0
    for number, ((rows, columns), share) in enumerate(zip(item.grids, kept, strict=True)):
        part = slice(start, start + rows * columns)
        if share:
            tensors: dict[str, Any] = {
                name: value[part] if len(value) else value
                for name, value in item._asdict().items()
                if isinstance(value, Tensor) and name != "units"
            }
            whole = item._replace(
                **tensors, units=None, budget=share, grids=item.grids[number : number + 1]
            )
            units.append(whole)
            firsts.append(start)
        start = part.stop
    return units, firsts


def _joined(units: Sequence[KeptTokens], firsts: Sequence[int], tokens: int) -> KeptTokens:
    """Return the tokens kept of all units of an item, with indices within the item."""
    if len(units) == 1 and firsts[0] == 0 and units[0].weights is None:
        return units[0]
    weights = None
    if any(unit.weights is not None for unit in units):
        weights = torch.cat(
            [_wide(unit, first, tokens) for unit, first in zip(units, firsts, strict=True)]
        )
    indices = [unit.indices + first for unit, first in zip(units, firsts, strict=True)]
    return KeptTokens(torch.cat(indices), torch.cat([unit.is_anchor for unit in units]), weights)


def _wide(unit: KeptTokens, first: int, tokens: int) -> Tensor:
    """Return the weights of a unit, [K, unit size], padded to all tokens of the item, [K, N]."""
    if unit.weights is None:
        own = torch.nn.functional.one_hot(unit.indices, tokens - first).float()
    else:
        own = unit.weights
    return torch.nn.functional.pad(own, (first, tokens - first - own.shape[1]))

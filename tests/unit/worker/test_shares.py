# SPDX-License-Identifier: Apache-2.0
"""Selection of items whose units have fixed shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anchorprune_vllm.selection import Candidates, KeptTokens
from anchorprune_vllm.worker.shares import select_with_shares


def highest(items: Sequence[Candidates]) -> list[KeptTokens]:
    """Keep the most important tokens; the first of them is the anchor."""
    kept = []
    for item in items:
        indices = item.importance.topk(item.budget).indices.sort().values
        kept.append(KeptTokens(indices, torch.arange(len(indices)) == 0))
    return kept


def item(importance: Sequence[float], grids: Sequence[tuple[int, int]]) -> Candidates:
    values = torch.tensor(importance).float()
    return Candidates(values, values[:, None], values, len(values), grids=grids)


TILES = item([1, 2, 9, 8, 7, 6], [(1, 2), (2, 2)])


def test_each_unit_keeps_its_share() -> None:
    whole = item([3, 1, 2], [(1, 3)])._replace(budget=2)
    first, second = select_with_shares(highest, [TILES, whole], [[1, 2], [2]])
    assert first.indices.tolist() == [1, 2, 3]
    assert first.is_anchor.tolist() == [True, True, False]
    assert second.indices.tolist() == [0, 2]


def test_units_without_a_share_are_passed_over() -> None:
    (kept,) = select_with_shares(highest, [TILES], [[0, 3]])
    assert kept.indices.tolist() == [2, 3, 4]
    assert kept.is_anchor.tolist() == [True, False, False]


def test_a_unit_is_an_item_of_its_own() -> None:
    seen: list[Candidates] = []

    def look(items: Sequence[Candidates]) -> list[KeptTokens]:
        seen.extend(items)
        return highest(items)

    select_with_shares(look, [TILES._replace(keys=torch.rand(6, 1, 2))], [[1, 2]])
    assert [(each.budget, each.grids, len(each.features)) for each in seen] == [
        (1, [(1, 2)], 2),
        (2, [(2, 2)], 4),
    ]
    assert [each.units for each in seen] == [None, None]
    assert [len(each.keys) for each in seen if each.keys is not None] == [2, 4]


def test_sums_of_tokens_stay_within_their_unit() -> None:
    def merge(items: Sequence[Candidates]) -> list[KeptTokens]:
        def merged(each: Candidates) -> KeptTokens:
            tokens = len(each.features)
            weights: Tensor = torch.full((each.budget, tokens), 1 / tokens)
            indices = torch.arange(each.budget)
            return KeptTokens(indices, torch.zeros(each.budget, dtype=torch.bool), weights)

        return [merged(each) for each in items]

    (kept,) = select_with_shares(merge, [TILES], [[1, 1]])
    assert kept.indices.tolist() == [0, 2]
    rows = kept.rows_of(TILES.importance[:, None])
    assert rows.flatten().tolist() == [1.5, 7.5]

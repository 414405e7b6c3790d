# SPDX-License-Identifier: Apache-2.0
"""The method in plain numpy."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np


class Tokens(NamedTuple):
    """The candidates of one image or video."""

    importance: np.ndarray  # [N]
    features: np.ndarray  # [N, D1], normalised, of Stage 1
    context: np.ndarray  # [N, D2], normalised, of Stage 2
    units: np.ndarray  # [N], non-decreasing


def select(tokens: Tokens, relevance: np.ndarray | None, budget: int) -> list[int]:
    """Indices of the kept tokens, ascending; `relevance` None: no question."""
    anchor = anchor_of(tokens, relevance, budget)
    return sorted(expand(anchor, tokens.importance, tokens.context, budget))


def select_from_each_unit(tokens: Tokens, relevance: np.ndarray | None, budget: int) -> list[int]:
    """The same where each unit has its share of the budget beforehand, and is chosen from alone."""
    members = [np.flatnonzero(tokens.units == unit) for unit in np.unique(tokens.units)]
    shares = largest_remainder(budget, [len(unit) for unit in members])
    kept: list[int] = []
    for unit, share in zip(members, shares, strict=True):
        if share:
            alone = Tokens(*(part[unit] for part in tokens))
            found = select(alone, None if relevance is None else relevance[unit], share)
            kept += [int(unit[i]) for i in found]
    return kept


def anchor_of(tokens: Tokens, relevance: np.ndarray | None, budget: int) -> list[int]:
    """The anchors of all units."""
    anchor: list[int] = []
    if relevance is not None:
        members = [np.flatnonzero(tokens.units == unit) for unit in np.unique(tokens.units)]
        shares = largest_remainder(budget, [len(unit) for unit in members])
        for unit, share in zip(members, shares, strict=True):
            if share:
                found = adaptive_anchor(relevance[unit], tokens.features[unit], share)
                anchor += [int(unit[i]) for i in found]
    return anchor


def largest_remainder(total: int, sizes: list[int]) -> list[int]:
    """`total` divided among units in proportion to their sizes; ties to the earlier unit."""
    exact = [Fraction(total * size, sum(sizes)) for size in sizes]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda u: (shares[u] - exact[u], u))
    for unit in by_remainder[: total - sum(shares)]:
        shares[unit] += 1
    return shares


def adaptive_anchor(relevance: np.ndarray, features: np.ndarray, budget: int) -> list[int]:
    """Stage 1: the first K_rel tokens by relevance."""
    order = sorted(range(len(relevance)), key=lambda i: (-relevance[i], i))
    smallest = max(1, 5 * budget // 32)
    largest = max(smallest, budget // 2)
    novel = 0
    for t in range(smallest, largest):
        distance = min(1 - features[order[t]] @ features[j] for j in order[:smallest])
        novel += distance > 0.2
        if novel == 3:
            return order[: t + 1]
    return order[:largest]


def expand(
    anchor: list[int], importance: np.ndarray, features: np.ndarray, budget: int
) -> list[int]:
    """Stage 2: importance x novelty, one token at a time."""
    kept = list(anchor) or [int(np.argmax(importance))]
    novelty = distances(features, kept).min(axis=1)
    while len(kept) < budget:
        score = importance * novelty
        score[kept] = -np.inf
        kept.append(int(np.argmax(score)))
        novelty = np.minimum(novelty, distances(features, kept[-1:])[:, 0])
    return kept


def distances(features: np.ndarray, others: list[int]) -> np.ndarray:
    """Cosine distances; copies are at 0, not at what rounding leaves of it."""
    return np.round(1 - features @ features[others].T, 12)


def normalised(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)

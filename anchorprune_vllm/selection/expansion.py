# SPDX-License-Identifier: Apache-2.0
"""Stage 2 of AnchorPrune: contextual expansion.

"AnchorPrune: Relevance-Anchored Contextual Expansion for Visual Token Pruning",
Kyuan Oh and Bumsoo Kim, section "Contextual Expansion".

The kept set starts as the anchor and takes in, one at a time, the token with the largest product of
importance and novelty, which is the cosine distance to the nearest token kept so far. The paper's
ablations put something else in the place of importance, or add a term.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anchorprune_vllm.selection.exact_cosine import distances, unit_rows

MAX_DISTANCE = 2.0
"""The largest cosine distance there is."""


class Score(NamedTuple):
    """How tokens score, given how novel they are: weight times novelty, or their sum."""

    weight: Tensor  # not negative
    adds: bool = False

    def of(self, novelty: Tensor) -> Tensor:
        """Return the scores, in the shape of both, as a new tensor."""
        return self.weight + novelty if self.adds else self.weight * novelty


def expand(features: Tensor, score: Score, anchor: Tensor, budget: int) -> Tensor:
    """Choose the tokens of one item, one at a time; the plain form, which others are held to.

    The anchor is chosen first, in native order. Then each choice is the token that scores best
    given all those before it; of equals, the one with the lower index. Without an anchor all tokens
    are as novel as can be at first, so the first choice goes by the weight alone.

    Args:
        features: [N, D], any float dtype.
        score: of weights [N] in the working dtype, small enough for twice of them to be finite.
        anchor: [N] bool.
        budget: K, at least the size of the anchor and at most N.

    Returns:
        [K] int64, in the order of choice.
    """
    rows = unit_rows(features)[None]
    novelty = rows.new_full(anchor.shape, MAX_DISTANCE)
    taken = torch.zeros_like(anchor)
    chosen = torch.empty(budget, dtype=torch.int64, device=rows.device)
    for step in range(budget):
        # 1. Score. -inf for what is taken, and for nothing else: no token is chosen twice.
        scores = score.of(novelty).masked_fill_(anchor, torch.inf).masked_fill_(taken, -torch.inf)
        # 2. Choose the first of equals, which is the lower index.
        choice = scores.argmax(0, keepdim=True)
        chosen[step : step + 1] = choice
        taken.index_fill_(0, choice, True)
        # 3. The kept set is now as near as the choice, or as near as it was.
        novelty = novelty.minimum(distances(rows, rows[:, choice]).flatten())
    return chosen


class Expansion(NamedTuple):
    """The tokens that were chosen of several items, one item behind the other."""

    chosen: Tensor  # [sum of K] int64, of each item the anchor first, then in the order of choice
    ascending: Tensor  # [sum of K] int64, the same in native order
    is_anchor: Tensor  # [sum of K] bool, of `ascending`


def expand_one_by_one(
    features: Tensor, sizes: Sequence[int], score: Score, anchor: Tensor, budgets: Sequence[int]
) -> Expansion:
    """Choose the tokens of several items by the plain form.

    Memory grows with the number of tokens, and a step reads all rows of an item: on a GPU this is
    the form for items of which the distances of all pairs are too large to be kept.

    Args:
        features: [T, D], the tokens of all items one behind the other.
        sizes: tokens of each item, T in all.
        score: of weights [T].
        anchor: [T] bool.
        budgets: K of each item.
    """
    items = zip(
        features.split(list(sizes)),
        score.weight.split(list(sizes)),
        anchor.split(list(sizes)),
        budgets,
        strict=True,
    )
    results = []
    for rows, weight, item_anchor, budget in items:
        chosen = expand(rows, Score(weight, score.adds), item_anchor, budget)
        ascending = chosen.sort().values
        results.append((chosen, ascending, item_anchor[ascending]))
    return Expansion(*map(torch.cat, zip(*results, strict=True)))

# SPDX-License-Identifier: Apache-2.0
"""Stage 2 of AnchorPrune: contextual expansion.

"AnchorPrune: Relevance-Anchored Contextual Expansion for Visual Token Pruning",
Kyuan Oh and Bumsoo Kim, section "Contextual Expansion".

The kept set starts as the anchor and takes in, one at a time, the token with the largest product of
importance and novelty, which is the cosine distance to the nearest token kept so far. The paper's
ablations put something else in the place of importance, or add a term.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anchorprune_vllm.selection.cosine import distances, half_squares

FARTHEST = 2.0
"""The largest cosine distance there is."""

_ANCHORS_AT_ONCE = 256


class Worth(NamedTuple):
    """What tokens are worth, given how novel they are: factor * novelty + addend."""

    factor: Tensor
    addend: Tensor | None = None

    def of(self, novelty: Tensor) -> Tensor:
        """In the shape of all three, a new tensor."""
        scores = self.factor * novelty
        return scores if self.addend is None else scores.add_(self.addend)

    def batched(self) -> Worth:
        """Of a batch of one item."""
        return Worth(self.factor[None], None if self.addend is None else self.addend[None])


def novelty_to_anchor(rows: Tensor, anchor: Tensor, most: int) -> Tensor:
    """Distance of every token to the nearest anchor token.

    Without an anchor it is the farthest there is: the first choice then goes by
    importance alone, and the distances to that choice replace it everywhere.

    Args:
        rows: [B, N, D] of `unit_rows`.
        anchor: [B, N] bool.
        most: no item has more anchor tokens than this.

    Returns:
        [B, N] float64.
    """
    novelty = rows.new_full(anchor.shape, FARTHEST)
    there, index = anchor.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    halves = half_squares(rows)
    # Some at a time: with a large budget, all products would be a matter of N x N.
    for start in range(0, most, _ANCHORS_AT_ONCE):
        some = slice(start, min(start + _ANCHORS_AT_ONCE, most))
        anchors = rows.take_along_dim(index[:, some, None], 1)
        found = distances(rows, anchors, halves, halves.gather(1, index[:, some]))
        filler = there[:, None, some] == 0  # an item may have fewer than `most`
        novelty = novelty.minimum(found.masked_fill_(filler, FARTHEST).amin(2))
    return novelty


def greedy_expansion(
    rows: Tensor, worth: Worth, novelty: Tensor, taken: Tensor, steps: Tensor, most: int
) -> Tensor:
    """Choose tokens one by one, each the one that is worth most; ties: lower index.

    Every step is one batched matrix-vector product: the plain form, which the kernels are held to.

    Args:
        rows: [B, N, D] of `unit_rows`.
        worth: [B, N] each, float64, small enough for thrice of it to be finite.
        novelty: [B, N] float64 of `novelty_to_anchor`.
        taken: [B, N] bool, tokens that cannot be chosen: the anchor and padding.
        steps: [B] int64, how many tokens to choose of each item; as many are left.
        most: no item has more steps than this.

    Returns:
        [B, most] int64, in the order of choice; N behind the last.
    """
    items, tokens, _ = rows.shape
    flat = rows.flatten(0, 1)
    halves = half_squares(rows)
    offset = torch.arange(items, device=rows.device)[:, None] * tokens
    choices = torch.empty(items, most, dtype=torch.int64, device=rows.device)
    taken = taken.clone()
    for step in range(most):
        # 1. Score. -inf for what is taken, and for nothing else: no token is chosen twice.
        scores = worth.of(novelty).masked_fill_(taken, -torch.inf)
        # 2. Choose the first of equals, which is the lower index.
        choice = scores.argmax(1, keepdim=True)
        choices[:, step : step + 1] = choice
        taken.scatter_(1, choice, True)
        # 3. The kept set is now as near as the choice, or as near as it was.
        chosen = flat.index_select(0, (choice + offset).view(-1))[:, None]
        found = distances(rows, chosen, halves, halves.gather(1, choice))
        novelty = novelty.minimum(found.squeeze(2))
    surplus = torch.arange(most, device=rows.device) >= steps[:, None]
    return choices.masked_fill_(surplus, tokens)

# SPDX-License-Identifier: Apache-2.0
"""AnchorPrune as in the paper: one image or video, in plain torch, from top to bottom.

"AnchorPrune: Relevance-Anchored Contextual Expansion for Visual Token Pruning",
Kyuan Oh and Bumsoo Kim. Equations are named by their labels in the paper's source.

This is the form to read, and the one that the fast forms in `kernels/` are held to; `batch.py`
chooses between them. It also runs on a device: sizes are numbers that the host knows, and what
depends on values is a mask, so the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from anchorprune_vllm.anchor_params import AnchorParams
from anchorprune_vllm.selection.exact_cosine import (
    MAX_DISTANCE,
    distances,
    unit_rows,
    working_dtype,
)
from anchorprune_vllm.selection.scores import Score, score_of
from anchorprune_vllm.selection.types import Candidates, KeptTokens
from anchorprune_vllm.selection.units import Unit, anchored_units

Expand = Callable[[Tensor, Score, Tensor, int], Tensor]
"""A function with the arguments and the result of `contextual_expansion`."""


class Anchor(NamedTuple):
    """How the anchor of a unit grew, rank by rank, up to K_max."""

    ranking: Tensor  # [K_max] int64: pi, the unit's tokens by falling relevance
    is_novel: Tensor  # [K_max] bool: behind the first K_min, and far from all of those
    is_kept: Tensor  # [K_max] bool: the anchor S_rel, the first K_rel ranks


def select(item: Candidates, params: AnchorParams, expand: Expand | None = None) -> KeptTokens:
    """Select the tokens of one item.

    expand: a faster form of Stage 2.
    """
    # Stage 1: the anchor of every unit (image, crop or frame).
    is_anchor = protected_anchor(item, params)

    # Stage 2: the context, once over all units.
    score = score_of(item, params.stage2)
    chosen = (expand or contextual_expansion)(item.context.detach(), score, is_anchor, item.kept)

    # The language model gets the tokens in their native order.
    if params.order == "native":
        indices = chosen.sort().values
    else:
        indices = in_order_of_choice(item, is_anchor, chosen)
    return KeptTokens(indices, is_anchor[indices])


def protected_anchor(item: Candidates, params: AnchorParams) -> Tensor:
    """Mark the anchor of every unit of an item, [N] bool; without a question there is none."""
    is_anchor = torch.zeros_like(item.importance, dtype=torch.bool)
    if item.relevance is not None:
        for unit in anchored_units(item, params):
            relevance, features = item.relevance[unit.tokens], item.features[unit.tokens]
            anchor = relevance_anchor(relevance, features, unit, params)
            is_anchor[unit.tokens].scatter_(0, anchor.ranking, anchor.is_kept)
    return is_anchor


def relevance_anchor(
    relevance: Tensor, features: Tensor, unit: Unit, params: AnchorParams
) -> Anchor:
    """Grow the protected anchor of a unit of N tokens ("Protected Relevance Anchoring").

    Args:
        relevance: [N], s of eq:negated_clip_similarity or eq:post_projector_relevance.
        features: [N, D1], h.
        unit: its K_min and K_max.
        params: tau and the patience P.
    """
    # The ranking pi: s falls, ties go to the lower index. No number is -inf, so it comes last.
    scores = relevance.to(working_dtype(relevance.device))
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ranking = scores.sort(descending=True, stable=True).indices[: unit.maximum]

    # eq:anchor_novelty: how far each rank is from the initial anchor A_min, the first K_min.
    rows = unit_rows(features[ranking])[None]
    novelty = distances(rows, rows[:, : unit.minimum])[0].amin(1)

    # eq:adaptive_krel: the anchor ends with the P-th novel token, or else at K_max. So a rank is in
    # while fewer than P novel ones came before it.
    rank = torch.arange(unit.maximum, device=ranking.device)
    is_novel = (novelty > params.tau) & (rank >= unit.minimum)
    came_before = is_novel.cumsum(0) - is_novel.long()
    return Anchor(ranking, is_novel, (rank < unit.minimum) | (came_before < params.patience))


def contextual_expansion(features: Tensor, score: Score, anchor: Tensor, budget: int) -> Tensor:
    """Choose the tokens of an item of N tokens one at a time ("Contextual Expansion").

    The anchor is chosen first, in native order. Without one all tokens are as novel as can be at
    first, so the first choice goes by importance alone.

    Args:
        features: [N, D2], h.
        score: p, the importance, or what an ablation puts in its place.
        anchor: [N] bool, S_rel.
        budget: K, at least the size of the anchor and at most N.

    Returns:
        [K] int64, in the order of choice.
    """
    rows = unit_rows(features)[None]
    novelty = rows.new_full(anchor.shape, MAX_DISTANCE)
    taken = torch.zeros_like(anchor)
    chosen = torch.empty(budget, dtype=torch.int64, device=rows.device)
    for step in range(budget):
        # eq:importance_weighted_novelty: p_i times novelty. What is taken scores -inf, and nothing
        # else does, so no token is chosen twice; of equals, the lower index is chosen.
        scores = score.of(novelty).masked_fill_(anchor, torch.inf).masked_fill_(taken, -torch.inf)
        choice = scores.argmax(0, keepdim=True)
        chosen[step : step + 1] = choice
        taken.index_fill_(0, choice, True)
        # eq:context_novelty: S is now as near as the choice, or as near as it was.
        novelty = novelty.minimum(distances(rows, rows[:, choice]).flatten())
    return chosen


def in_order_of_choice(item: Candidates, anchor: Tensor, chosen: Tensor) -> Tensor:
    """Return the tokens [K] with the anchor first, by falling relevance, then the others as chosen.

    Args:
        item: the item.
        anchor: [N] bool.
        chosen: [K], the result of `contextual_expansion`.
    """
    if item.relevance is None:
        return chosen
    relevance = item.relevance.nan_to_num(nan=-torch.inf)[chosen]  # last, as in the ranking
    by_relevance = relevance.masked_fill(~anchor[chosen], -torch.inf)
    return chosen[by_relevance.sort(descending=True, stable=True).indices]

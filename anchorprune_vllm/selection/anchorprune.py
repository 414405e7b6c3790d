# SPDX-License-Identifier: Apache-2.0
"""AnchorPrune as in the paper, for one image or video, in plain torch, from top to bottom.

"AnchorPrune: Relevance-Anchored Contextual Expansion for Visual Token Pruning",
Kyuan Oh and Bumsoo Kim. Equations are named by their labels in the paper's source.

This is the form to read, and the one that the fast forms in `kernels/` are compared with;
`batch.py` chooses between them. It also runs on a device: all sizes are known to the host, and what
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
    """The ranks of a unit up to K_max, and which of them are novel and which are the anchor."""

    ranking: Tensor  # [K_max] int64: pi, the unit's tokens by descending relevance
    is_novel: Tensor  # [K_max] bool: after the first K_min, and far from all of those
    is_kept: Tensor  # [K_max] bool: the anchor S_rel, which is the first K_rel ranks


def select(item: Candidates, params: AnchorParams, expand: Expand | None = None) -> KeptTokens:
    """Select the tokens of one item; `expand` is a faster form of Stage 2."""
    # Stage 1: the anchor of every unit (image, crop or frame).
    is_anchor = protected_anchor(item, params)

    # Stage 2: the context, over all units at once.
    score = score_of(item, params.stage2)
    chosen = (expand or contextual_expansion)(item.context.detach(), score, is_anchor, item.kept)

    # The language model gets the tokens in their native order.
    if params.order == "native":
        indices = chosen.sort().values
    else:
        indices = in_order_of_choice(item, is_anchor, chosen)
    return KeptTokens(indices, is_anchor[indices])


def protected_anchor(item: Candidates, params: AnchorParams) -> Tensor:
    """Return a mask [N] of the anchors of all units of an item; empty without a question."""
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
        relevance: s of eq:negated_clip_similarity or eq:post_projector_relevance, [N].
        features: h, [N, D1].
        unit: K_min and K_max of the unit.
        params: tau and the patience P.
    """
    # The ranking pi is by descending s; ties go to the lower index, and NaN comes last.
    scores = relevance.to(working_dtype(relevance.device))
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ranking = scores.sort(descending=True, stable=True).indices[: unit.maximum]

    # eq:anchor_novelty: how far each rank is from the initial anchor A_min, the first K_min.
    rows = unit_rows(features[ranking])[None]
    novelty = distances(rows, rows[:, : unit.minimum])[0].amin(1)

    # eq:adaptive_krel: the anchor ends with the P-th novel token, or else at K_max. A rank is thus
    # in the anchor as long as fewer than P novel ones came before it.
    rank = torch.arange(unit.maximum, device=ranking.device)
    is_novel = (novelty > params.tau) & (rank >= unit.minimum)
    came_before = is_novel.cumsum(0) - is_novel.long()
    return Anchor(ranking, is_novel, (rank < unit.minimum) | (came_before < params.patience))


def contextual_expansion(features: Tensor, score: Score, anchor: Tensor, budget: int) -> Tensor:
    """Choose the tokens of an item of N tokens one at a time ("Contextual Expansion").

    The anchor is chosen first, in native order. Without an anchor, all tokens start with the
    largest novelty, so the first choice depends on importance alone.

    Args:
        features: h, [N, D2].
        score: The importance p, or what an ablation uses in its place.
        anchor: S_rel, a mask [N].
        budget: K, at least the size of the anchor and at most N.

    Returns:
        The chosen tokens, int64 [K], in the order of choice.
    """
    rows = unit_rows(features)[None]
    novelty = rows.new_full(anchor.shape, MAX_DISTANCE)
    taken = torch.zeros_like(anchor)
    chosen = torch.empty(budget, dtype=torch.int64, device=rows.device)
    for step in range(budget):
        # eq:importance_weighted_novelty: p_i times novelty. Only taken tokens score -inf, so no
        # token is chosen twice. Ties go to the lower index.
        scores = score.of(novelty).masked_fill_(anchor, torch.inf).masked_fill_(taken, -torch.inf)
        choice = scores.argmax(0, keepdim=True)
        chosen[step : step + 1] = choice
        taken.index_fill_(0, choice, True)
        # eq:context_novelty: the distance to S is now that to the choice, if it is smaller.
        novelty = novelty.minimum(distances(rows, rows[:, choice]).flatten())
    return chosen


def in_order_of_choice(item: Candidates, anchor: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen tokens [K] with the anchor first, by descending relevance.

    Args:
        item: The item that the tokens belong to.
        anchor: The mask [N] of its anchors.
        chosen: The result of `contextual_expansion`, [K].
    """
    if item.relevance is None:
        return chosen
    relevance = item.relevance.nan_to_num(nan=-torch.inf)[chosen]  # NaN is last, as in the ranking
    by_relevance = relevance.masked_fill(~anchor[chosen], -torch.inf)
    return chosen[by_relevance.sort(descending=True, stable=True).indices]

# SPDX-License-Identifier: Apache-2.0
"""Which visual tokens AnchorPrune keeps: the public functions.

"AnchorPrune: Relevance-Anchored Contextual Expansion for Visual Token Pruning",
Kyuan Oh and Bumsoo Kim. Stage 1 is in `anchor.py`, Stage 2 in `expansion.py`.

An item gives the same tokens alone and in any batch. On a CPU all arithmetic is exact
(`exact_cosine.py`). On a device it is float32, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from anchorprune_vllm import budget as counts
from anchorprune_vllm.config import Order, Stage2
from anchorprune_vllm.selection.anchor import Unit
from anchorprune_vllm.selection.device import in_parallel, reads_are_free
from anchorprune_vllm.selection.exact_cosine import working_dtype
from anchorprune_vllm.selection.expansion import Score
from anchorprune_vllm.selection.kernels import anchoring, device_expansion, host_expansion
from anchorprune_vllm.selection.types import (
    AnchorParams,
    Candidates,
    KeptTokens,
    validate,
)


def anchor_prune(
    relevance: Tensor | None,
    features: Tensor,
    importance: Tensor,
    budget: int,
    context_features: Tensor | None = None,
    units: Tensor | None = None,
    min_anchor: int | None = AnchorParams.min_anchor,
    tau: float = AnchorParams.tau,
    patience: int = AnchorParams.patience,
    max_anchor_ratio: float = AnchorParams.max_anchor_ratio,
    stage2: Stage2 = AnchorParams.stage2,
    order: Order = AnchorParams.order,
) -> KeptTokens:
    """Select the tokens of one image or video.

    Args:
        relevance: [N], larger is more relevant to the query. None (no query): no anchor, the
            expansion starts from the most important token.
        features: [N, D1], the space in which Stage 1 measures novelty.
        importance: [N], how much a token matters whatever the query; not negative.
        budget: K, the number of tokens to keep; N and more keep all.
        context_features: [N, D2], the space in which Stage 2 measures novelty; default: `features`.
        units: [N] int, non-decreasing: the unit (crop, frame) of each token; default: one unit.
            Read by the host: give it as a CPU tensor, a device tensor costs a synchronisation.
        min_anchor: K_min of every unit; default: the paper's schedule.
        tau: cosine distance above which a token counts as novel.
        patience: number of novel tokens at which the anchor of a unit ends.
        max_anchor_ratio: K_max of a unit as a share of its budget.
        stage2: what a token is worth in Stage 2, `importance` or one of the paper's ablations.
            Those with relevance scale it to 0..1 over the item; without a query they are novelty
            alone.
        order: `native`, or `selection`: the anchor by falling relevance, then the rest as chosen.

    Returns:
        The K tokens, and which of them are the anchor.

    Raises:
        ValueError: an argument is not as described here or, for CPU tensors, not finite or (of
            importance) negative. Device tensors are not searched for that, as the host would have
            to wait for the answer.
    """
    item = Candidates(relevance, features, importance, budget, context_features, units)
    validate(item)
    params = AnchorParams(min_anchor, tau, patience, max_anchor_ratio, stage2, order)
    return select_batch([item], params)[0]


def anchor_prune_batch(items: Sequence[Candidates], **params: Any) -> list[KeptTokens]:
    """Select the tokens of many items at once; results and `params` as of `anchor_prune`.

    The items share a device and the feature sizes D1 and D2, not the number of tokens.
    """
    for number, item in enumerate(items):
        validate(item, f"item {number}: ")
    shared = {
        "device": {str(item.features.device) for item in items},
        "size D1": {str(item.features.shape[1]) for item in items},
        "size D2": {str(item.context.shape[1]) for item in items},
    }
    for name, given in shared.items():
        if len(given) > 1:
            raise ValueError(
                f"The items have features of different {name}: {', '.join(sorted(given))}; "
                "give them in separate batches."
            )
    return select_batch(items, AnchorParams(**params))


@torch.no_grad()
def select_batch(items: Sequence[Candidates], params: AnchorParams) -> list[KeptTokens]:
    """`anchor_prune_batch` without validation: for callers that made the items themselves.

    Numbers that are not finite give some K distinct tokens, never an error; an importance below 0
    counts as 0.
    """
    if not items:
        return []
    # 1. The anchors of all items that have a query; the others have none.
    asked = [item for item in items if item.relevance is not None]
    found = iter(
        anchoring(items[0].features.device)(
            [item.relevance for item in asked if item.relevance is not None],
            [item.features for item in asked],
            [anchored_units(item, params) for item in asked],
            params.tau,
            params.patience,
        )
        if asked
        else ()
    )
    anchors = [
        torch.zeros_like(item.importance, dtype=torch.bool)
        if item.relevance is None
        else next(found)
        for item in items
    ]

    # 2. Expansion.
    if reads_are_free(items[0].features):
        return _expand_on_host(items, anchors, params)
    return _expand_on_device(items, anchors, params)


def _expand_on_host(
    items: Sequence[Candidates], anchors: Sequence[Tensor], params: AnchorParams
) -> list[KeptTokens]:
    """Stage 2 item by item, on several threads: each item stays in its core's cache."""

    @torch.no_grad()  # the caller's is of its own thread
    def expand(item: Candidates, anchor: Tensor) -> KeptTokens:
        score = _score(item, params.stage2)
        chosen = host_expansion()(item.context.detach(), score, anchor, _kept(item))
        if params.order == "selection":
            indices = _in_order_of_choice(item, anchor, chosen)
        else:
            indices = chosen.sort().values
        return KeptTokens(indices, anchor[indices])

    return in_parallel(expand, items, anchors)


def _expand_on_device(
    items: Sequence[Candidates], anchors: Sequence[Tensor], params: AnchorParams
) -> list[KeptTokens]:
    """Stage 2 of all items at once, their tokens one behind the other."""
    sizes, budgets = [len(item.features) for item in items], [_kept(item) for item in items]
    rows, anchor = _joined([item.context for item in items]), _joined(anchors)
    score = _joined_score(items, params.stage2)
    found = device_expansion(rows.device)(rows, sizes, score, anchor, budgets)
    if params.order == "selection":
        chosen = found.chosen.split(budgets)
        orders = [_in_order_of_choice(*each) for each in zip(items, anchors, chosen, strict=True)]
        return [KeptTokens(order, a[order]) for order, a in zip(orders, anchors, strict=True)]
    return [
        KeptTokens(*kept)
        for kept in zip(found.ascending.split(budgets), found.is_anchor.split(budgets), strict=True)
    ]


def _kept(item: Candidates) -> int:
    """K: the budget, or all tokens if there are fewer."""
    return min(item.budget, len(item.features))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One behind the other; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _joined_score(items: Sequence[Candidates], stage2: Stage2) -> Score:
    """How the tokens of all items score, [T]."""
    if stage2 == "importance":  # in few kernels, however many items there are
        return _by_importance(_joined([item.importance for item in items]))
    scores = [_score(item, stage2) for item in items]
    return Score(_joined([score.weight for score in scores]), scores[0].adds)


def _score(item: Candidates, stage2: Stage2) -> Score:
    """How the tokens of an item score, [N] in the working dtype, finite and not negative."""
    if stage2 == "importance":
        return _by_importance(item.importance)
    ones = torch.ones_like(item.importance, dtype=working_dtype(item.importance.device))
    if stage2 == "diversity":
        return Score(ones)
    relevance = ones if item.relevance is None else scaled(item.relevance)
    return Score(relevance, adds=stage2 == "additive")


def _by_importance(importance: Tensor) -> Score:
    dtype = working_dtype(importance.device)
    # What is beyond this is cut, so that no score overflows.
    largest = torch.finfo(dtype).max / 4
    return Score(importance.to(dtype).nan_to_num(nan=0.0).clamp(0, largest))


def scaled(scores: Tensor) -> Tensor:
    """Scores [N] stretched to 0..1, in the working dtype; all 1 if all equal or not finite."""
    scores = scores.to(working_dtype(scores.device))
    low, high = scores.aminmax()
    return ((scores - low) / (high - low)).nan_to_num(nan=1.0).clamp(0, 1)


def _in_order_of_choice(item: Candidates, anchor: Tensor, chosen: Tensor) -> Tensor:
    """Tokens [K] of an item: the anchor by falling relevance, then the others as chosen.

    anchor: [N] bool; chosen: [K] of `Expansion`.
    """
    if item.relevance is None:
        return chosen
    relevance = item.relevance.nan_to_num(nan=-torch.inf)[chosen]  # last, as in the ranking
    by_relevance = relevance.masked_fill(~anchor[chosen], -torch.inf)
    order = by_relevance.sort(descending=True, stable=True).indices
    return chosen[order]


def anchored_units(item: Candidates, params: AnchorParams) -> list[Unit]:
    """The units of an item that have an anchor, with its bounds; none without a query."""
    if item.relevance is None:
        return []
    if item.units is None:
        sizes = [len(item.features)]
    else:
        sizes = [len(list(group)) for _, group in groupby(item.units.tolist())]
    units = []
    start = 0
    total = min(item.budget, sum(sizes))
    for size, share in zip(sizes, counts.unit_budgets(total, sizes), strict=True):
        minimum = counts.min_anchor(share)
        if params.min_anchor is not None:
            minimum = min(params.min_anchor, share)
        maximum = counts.max_anchor(share, minimum, params.max_anchor_ratio)
        if share:
            units.append(Unit(start, size, minimum, maximum))
        start += size
    return units

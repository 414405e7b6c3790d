# SPDX-License-Identifier: Apache-2.0
"""AnchorPrune for one item or many: the public functions, each by the form for where the items are.

An item gives the same tokens alone and in any batch. On a CPU all arithmetic is exact
(`exact_cosine.py`). On a device it is float32, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anchorprune_vllm.anchor_params import AnchorParams, Order, Stage2
from anchorprune_vllm.selection.anchorprune import in_order_of_choice, select
from anchorprune_vllm.selection.device import in_parallel, reads_are_free
from anchorprune_vllm.selection.kernels import host_expansion, runs_triton
from anchorprune_vllm.selection.scores import Score, score_by_importance, score_of
from anchorprune_vllm.selection.types import Candidates, KeptTokens, validate
from anchorprune_vllm.selection.units import anchored_units


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
            The host reads it: give it as a CPU tensor, a device tensor costs a synchronisation.
        min_anchor: K_min of every unit; default: the paper's schedule.
        tau: the cosine distance above which a token counts as novel.
        patience: the number of novel tokens at which the anchor of a unit ends.
        max_anchor_ratio: K_max of a unit as a share of its budget.
        stage2: how Stage 2 scores a token, `importance` or one of the paper's ablations. Those with
            relevance scale it to 0..1 over the item; without a query they are novelty alone.
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
    """Select the tokens of many items at once; results and `params` are those of `anchor_prune`.

    The items share a device and the feature sizes D1 and D2, but not the number of tokens.
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
    """Do what `anchor_prune_batch` does, for callers that made the items themselves.

    Nothing is checked: numbers that are not finite give some K distinct tokens, never an error, and
    an importance below 0 counts as 0.
    """
    if not items:
        return []
    if reads_are_free(items[0].features):
        return in_parallel(partial(_select_on_host, params), items)
    if runs_triton(items[0].features.device):
        return _select_by_triton(items, params)
    return [select(item, params) for item in items]


@torch.no_grad()  # the caller's is of its own thread
def _select_on_host(params: AnchorParams, item: Candidates) -> KeptTokens:
    """Select the tokens of an item on one thread, so that it stays in that core's cache."""
    return select(item, params, host_expansion())


def _select_by_triton(items: Sequence[Candidates], params: AnchorParams) -> list[KeptTokens]:
    """Select the tokens of all items at once, one item behind the other."""
    from anchorprune_vllm.selection.kernels import gpu, gpu_anchor

    asked = [(item, item.relevance) for item in items if item.relevance is not None]
    found = iter(
        gpu_anchor.relevance_anchors(
            [relevance for _, relevance in asked],
            [item.features for item, _ in asked],
            [anchored_units(item, params) for item, _ in asked],
            params.tau,
            params.patience,
        )
        if asked
        else ()
    )
    nothing = partial(torch.zeros_like, dtype=torch.bool)
    anchors = [
        nothing(item.importance) if item.relevance is None else next(found) for item in items
    ]
    budgets = [item.kept for item in items]
    expansion = gpu.expand(
        _joined([item.context for item in items]),
        [len(item.features) for item in items],
        _joined_score(items, params.stage2),
        _joined(anchors),
        budgets,
    )
    if params.order == "selection":
        chosen = expansion.chosen.split(budgets)
        orders = [in_order_of_choice(*each) for each in zip(items, anchors, chosen, strict=True)]
        return [KeptTokens(order, a[order]) for order, a in zip(orders, anchors, strict=True)]
    kept = zip(expansion.ascending.split(budgets), expansion.is_anchor.split(budgets), strict=True)
    return [KeptTokens(indices, is_anchor) for indices, is_anchor in kept]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors one behind the other; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _joined_score(items: Sequence[Candidates], stage2: Stage2) -> Score:
    """Return how the tokens of all items score, [T]."""
    if stage2 == "importance":  # in few kernels, however many items there are
        return score_by_importance(_joined([item.importance for item in items]))
    scores = [score_of(item, stage2) for item in items]
    return Score(_joined([score.weight for score in scores]), scores[0].adds)

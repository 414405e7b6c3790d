# SPDX-License-Identifier: Apache-2.0
"""The public functions of AnchorPrune, for one item or many, on any device.

An item keeps the same tokens alone and in any batch. On a CPU, all arithmetic is exact
(`exact_cosine.py`). On a device it is float32, and the host never waits.
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
        relevance: The relevance to the query, [N]; larger is more relevant. None means that there
            is no query and no anchor, and Stage 2 starts from the most important token.
        features: The features [N, D1] with which Stage 1 measures novelty.
        importance: How much each token matters whatever the query is, [N]; not negative.
        budget: K, the number of tokens to keep; all are kept if it is N or more.
        context_features: The features [N, D2] with which Stage 2 measures novelty; by default,
            `features`.
        units: The unit (crop, frame) of each token, [N] integers that do not decrease; by default,
            there is one unit. Give a CPU tensor: the host reads it, and a device tensor costs a
            synchronisation.
        min_anchor: K_min of every unit; by default, the paper's schedule.
        tau: The cosine distance above which a token counts as novel.
        patience: The number of novel tokens at which the anchor of a unit ends.
        max_anchor_ratio: K_max of a unit as a share of its budget.
        stage2: How Stage 2 scores a token, `importance` or one of the paper's ablations. Those that
            use relevance scale it to 0..1 over the item; without a query, only novelty counts.
        order: `native`, or `selection`, in which the anchor comes first, by descending relevance,
            and then the rest as it was chosen.

    Returns:
        The K tokens, and which of them are the anchor.

    Raises:
        ValueError: If an argument is not as described here or, for CPU tensors, has values that
            are not finite or (importance) negative. The values of device tensors are not checked,
            because the host would have to wait for them.
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
    """Do what `anchor_prune_batch` does, without checking the items.

    Numbers that are not finite lead to some K distinct tokens, never to an error, and an importance
    below 0 counts as 0.
    """
    if not items:
        return []
    if reads_are_free(items[0].features):
        return in_parallel(partial(_select_on_host, params), items)
    if runs_triton(items[0].features.device):
        return _select_by_triton(items, params)
    return [select(item, params) for item in items]


@torch.no_grad()  # that of the caller applies only to its own thread
def _select_on_host(params: AnchorParams, item: Candidates) -> KeptTokens:
    """Select the tokens of an item on one thread, so that it stays in the cache of one core."""
    return select(item, params, host_expansion())


def _select_by_triton(items: Sequence[Candidates], params: AnchorParams) -> list[KeptTokens]:
    """Select the tokens of all items at once with the Triton kernels."""
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
    """Return the tensors concatenated, or a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _joined_score(items: Sequence[Candidates], stage2: Stage2) -> Score:
    """Return the score of the tokens of all items, [T]."""
    if stage2 == "importance":  # this takes few kernels, however many items there are
        return score_by_importance(_joined([item.importance for item in items]))
    scores = [score_of(item, stage2) for item in items]
    return Score(_joined([score.weight for score in scores]), scores[0].adds)

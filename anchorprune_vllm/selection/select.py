# SPDX-License-Identifier: Apache-2.0
"""Which visual tokens AnchorPrune keeps: the public functions.

"AnchorPrune: Relevance-Anchored Contextual Expansion for Visual Token Pruning",
Kyuan Oh and Bumsoo Kim. Stage 1 is in `anchor.py`, Stage 2 in `expand.py`.

All arithmetic is float64 whatever dtype comes in, and cosines are exact (`cosine.py`): an item
gives the same tokens alone and in any batch. On a device the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from anchorprune_vllm import budget as counts
from anchorprune_vllm.config import Order, Stage2
from anchorprune_vllm.selection.anchor import Unit, relevance_anchors
from anchorprune_vllm.selection.candidates import (
    AnchorParams,
    Candidates,
    KeptTokens,
    validate,
)
from anchorprune_vllm.selection.cosine import unit_rows
from anchorprune_vllm.selection.expand import Worth, novelty_to_anchor
from anchorprune_vllm.selection.host import in_parallel, reads_are_free, to_device
from anchorprune_vllm.selection.kernels import device_expansion, host_expansion

# What is beyond this is cut, so that no score overflows to the -inf of a token that is taken.
_LARGEST = torch.finfo(torch.float64).max / 4


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
    # 1. The anchors of all items that have a query; the others have none.
    plans = [anchored_units(item, params) for item in items]
    anchors = [torch.zeros_like(item.importance, dtype=torch.bool) for item in items]
    asked = [number for number, item in enumerate(items) if item.relevance is not None]
    if asked:
        found = relevance_anchors(
            [item.relevance for item in items if item.relevance is not None],
            [items[number].features for number in asked],
            [plans[number] for number in asked],
            params.tau,
            params.patience,
        )
        for number, anchor in zip(asked, found, strict=True):
            anchors[number] = anchor

    # 2. Expansion.
    if items and reads_are_free(items[0].features):
        return _expand_on_host(items, anchors, params)
    return _expand_on_device(items, plans, anchors, params)


def _expand_on_host(
    items: Sequence[Candidates], anchors: Sequence[Tensor], params: AnchorParams
) -> list[KeptTokens]:
    """Stage 2 item by item: each stays in its core's cache, and works on no padding."""

    @torch.no_grad()  # the caller's is of its own thread
    def expand(item: Candidates, anchor: Tensor) -> KeptTokens:
        worth = _worth(item, params.stage2)
        steps = min(item.budget, len(anchor)) - int(anchor.sum())
        choices = host_expansion()(item.context.detach(), worth, anchor, steps)
        return _in_order([item], anchor[None], choices[None], params.order)[0]

    return in_parallel(expand, items, anchors)


def _expand_on_device(
    items: Sequence[Candidates],
    plans: Sequence[Sequence[Unit]],
    anchors: Sequence[Tensor],
    params: AnchorParams,
) -> list[KeptTokens]:
    """Stage 2 of B items at once, padded to the longest."""
    if not items:
        return []
    # 1. Pad to [B, N]. Padding is not there to be taken.
    shape = len(items), max(len(item.features) for item in items)
    rows = _pad((unit_rows(item.context) for item in items), *shape)
    worths = [_worth(item, params.stage2) for item in items]
    worth = Worth(_pad((w.factor for w in worths), *shape))
    if params.stage2 == "additive":
        addends = (w.addend for w in worths if w.addend is not None)
        worth = Worth(worth.factor, _pad(addends, *shape))
    anchor = _pad(anchors, *shape)
    padding = ~_pad((torch.ones_like(mask) for mask in anchors), *shape)

    # 2. Bounds that the host knows: the size of an anchor, and the steps that are missing.
    keep = [min(item.budget, len(item.features)) for item in items]
    largest = max(sum(unit.maximum for unit in plan) for plan in plans)
    least = [sum(unit.minimum for unit in plan) for plan in plans]
    most = max(total - low for total, low in zip(keep, least, strict=True))

    # 3. Expand.
    missing = to_device(keep, rows.device) - anchor.sum(1)
    novelty = novelty_to_anchor(rows, anchor, largest)
    choices = device_expansion(rows.device)(rows, worth, novelty, anchor | padding, missing, most)
    return _in_order(items, anchor, choices, params.order)


def _in_order(
    items: Sequence[Candidates], anchor: Tensor, choices: Tensor, order: Order
) -> list[KeptTokens]:
    """The kept tokens of B items. anchor: [B, N] bool; choices: [B, steps], N where there is none.

    Tokens are sorted with the kept ones first: how many those are, the host knows.
    """
    if order == "native":
        kept = torch.nn.functional.pad(anchor, (0, 1)).scatter_(1, choices, True)
        index = kept[:, :-1].to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    else:
        index = _in_order_of_choice(items, anchor, choices)
    is_anchor = anchor.gather(1, index)
    return [
        KeptTokens(index[row, :total].clone(), is_anchor[row, :total].clone())
        for row, total in enumerate(min(item.budget, len(item.features)) for item in items)
    ]


def _worth(item: Candidates, stage2: Stage2) -> Worth:
    """Of an item's tokens [N] float64, finite."""
    if stage2 == "importance":
        importance = item.importance.to(torch.float64).nan_to_num(nan=0.0)
        return Worth(importance.clamp(0, _LARGEST))
    ones = torch.ones_like(item.importance, dtype=torch.float64)
    if stage2 == "diversity":
        return Worth(ones)
    relevance = ones if item.relevance is None else scaled(item.relevance)
    return Worth(relevance) if stage2 == "multiplicative" else Worth(ones, relevance)


def scaled(scores: Tensor) -> Tensor:
    """Scores [N] stretched to 0..1, float64; all 1 if they are all equal or not finite."""
    scores = scores.to(torch.float64)
    low, high = scores.aminmax()
    return ((scores - low) / (high - low)).nan_to_num(nan=1.0).clamp(0, 1)


def _in_order_of_choice(items: Sequence[Candidates], anchor: Tensor, choices: Tensor) -> Tensor:
    """Tokens [B, N]: the anchor by falling relevance, then the choices, then what is not kept.

    anchor: [B, N] bool; choices: [B, steps], N where there is none.
    """
    tokens, steps = anchor.shape[1], choices.shape[1]
    chosen_at = torch.full_like(anchor, steps, dtype=torch.int64)
    chosen_at = torch.nn.functional.pad(chosen_at, (0, 1))
    numbers = torch.arange(steps, device=anchor.device).expand_as(choices)
    chosen_at = chosen_at.scatter_(1, choices, numbers)[:, :-1].masked_fill(anchor, -1)
    nothing = torch.zeros(tokens, device=anchor.device)
    scores = ((nothing if i.relevance is None else i.relevance).to(torch.float64) for i in items)
    relevance = _pad(scores, *anchor.shape).nan_to_num(nan=-torch.inf)  # last, as in the ranking
    by_relevance = relevance.sort(dim=1, descending=True, stable=True).indices
    then = chosen_at.gather(1, by_relevance).sort(dim=1, stable=True).indices
    return by_relevance.gather(1, then)


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


def _pad(tensors: Iterable[Tensor], items: int, longest: int) -> Tensor:
    """[B, N, ...] of B tensors [N_i, ...], zeros behind each. Holds one of them at a time."""
    if items == 1:
        return next(iter(tensors))[None]  # no copy
    padded: Tensor | None = None
    for number, tensor in enumerate(tensors):
        if padded is None:
            padded = tensor.new_zeros(items, longest, *tensor.shape[1:])
        padded[number, : len(tensor)] = tensor
    assert padded is not None
    return padded

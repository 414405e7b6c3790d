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
from anchorprune_vllm.selection.anchor import Unit, relevance_anchors
from anchorprune_vllm.selection.candidates import AnchorParams, Candidates, KeptTokens, validate
from anchorprune_vllm.selection.cosine import unit_rows
from anchorprune_vllm.selection.expand import greedy_expansion, novelty_to_anchor
from anchorprune_vllm.selection.host import reads_are_free, to_device
from anchorprune_vllm.selection.kernels.cpu import lazy_expansion

# Importance beyond this is cut, so that no score overflows to the -inf of a token that is taken.
_MOST_IMPORTANT = torch.finfo(torch.float64).max / 4


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
) -> KeptTokens:
    """Select the tokens of one image or video.

    Args:
        relevance: [N], larger is more relevant to the query. None (no query): no anchor, the
            expansion starts from the most important token.
        features: [N, D1], the space in which Stage 1 measures novelty.
        importance: [N], how much a token matters whatever the query.
        budget: K, the number of tokens to keep; N and more keep all.
        context_features: [N, D2], the space in which Stage 2 measures novelty; default: `features`.
        units: [N] int, non-decreasing: the unit (crop, frame) of each token; default: one unit.
            Read by the host: give it as a CPU tensor, a device tensor costs a synchronisation.
        min_anchor: K_min of every unit; default: the paper's schedule.
        tau: cosine distance above which a token counts as novel.
        patience: number of novel tokens at which the anchor of a unit ends.
        max_anchor_ratio: K_max of a unit as a share of its budget.

    Returns:
        The K tokens in native order, and which of them are the anchor.

    Raises:
        ValueError: an argument is not as described here or, for CPU tensors, not finite. Device
            tensors are not searched for that, as the host would have to wait for the answer.
    """
    item = Candidates(relevance, features, importance, budget, context_features, units)
    validate(item)
    return select_batch([item], AnchorParams(min_anchor, tau, patience, max_anchor_ratio))[0]


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

    Numbers that are not finite give some K distinct tokens, never an error.
    """
    # 1. The anchors of all items that have a query; the others have none.
    plans = [_plan(item, params) for item in items]
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

    # 2. Expansion. A device does all items at once; on a CPU there is no launch cost to share, one
    #    item at a time stays in the cache and works on no padding.
    together = 1 if not items or reads_are_free(items[0].features) else len(items)
    kept: list[KeptTokens] = []
    for at in range(0, len(items), together):
        group = slice(at, at + together)
        kept += _expand(items[group], plans[group], anchors[group])
    return kept


def _expand(
    items: Sequence[Candidates], plans: Sequence[Sequence[Unit]], anchors: Sequence[Tensor]
) -> list[KeptTokens]:
    """Stage 2 of B items, padded to the longest, and their kept tokens in native order."""
    keep = [min(item.budget, len(item.features)) for item in items]

    # 1. Pad to [B, N]. Padding is not there to be taken.
    shape = len(items), max(len(item.features) for item in items)
    rows = _pad((unit_rows(item.context) for item in items), *shape)
    importance = _pad((item.importance.to(torch.float64) for item in items), *shape)
    importance = importance.nan_to_num(nan=0.0).clamp(-_MOST_IMPORTANT, _MOST_IMPORTANT)
    anchor = _pad(anchors, *shape)
    padding = ~_pad((torch.ones_like(mask) for mask in anchors), *shape)

    # 2. How many anchor tokens there are and how many are missing: bounds that the host knows, or
    #    the numbers themselves where reading them waits for nothing.
    size = anchor.sum(1)
    missing = to_device(keep, rows.device) - size
    if reads_are_free(rows):
        most, steps = int(size.max()), int(missing.max())
    else:
        most = max(sum(unit.maximum for unit in plan) for plan in plans)
        least = [sum(unit.minimum for unit in plan) for plan in plans]
        steps = max(total - low for total, low in zip(keep, least, strict=True))

    # 3. Expand. Of its choices an item takes as many as it misses, the rest go to a dump column.
    novelty = novelty_to_anchor(rows, anchor, most)
    taken = anchor | padding
    if reads_are_free(rows):  # one item, see `select_batch`
        choices = lazy_expansion(rows[0], importance[0], novelty[0], taken[0], steps)[None]
    else:
        choices = greedy_expansion(rows, importance, novelty, taken, steps)
    surplus = torch.arange(steps, device=rows.device) >= missing[:, None]
    kept = torch.nn.functional.pad(anchor, (0, 1))
    kept.scatter_(1, choices.masked_fill(surplus, anchor.shape[1]), True)

    # 4. Native order: the kept ones first, each K known to the host.
    index = kept[:, :-1].to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    is_anchor = anchor.gather(1, index)
    return [
        KeptTokens(index[row, :total].clone(), is_anchor[row, :total].clone())
        for row, total in enumerate(keep)
    ]


def _plan(item: Candidates, params: AnchorParams) -> list[Unit]:
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

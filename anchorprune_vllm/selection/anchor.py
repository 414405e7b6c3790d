# SPDX-License-Identifier: Apache-2.0
"""Stage 1 of AnchorPrune: the protected relevance anchor.

"AnchorPrune: Relevance-Anchored Contextual Expansion for Visual Token Pruning",
Kyuan Oh and Bumsoo Kim, sections "Protected Relevance Anchoring" and "Adaptive Anchor Budget".

The anchor of a unit (an image, a crop, a frame) is the first K_rel of its tokens by relevance. How
many is read off the ranking: after the first K_min, tokens far from all of those are counted; the
one that makes it `patience` ends the anchor, and at K_max it ends in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.selection.exact_cosine import distances, unit_rows, working_dtype


class Unit(NamedTuple):
    """One unit that has an anchor: where its tokens are, and the bounds of the anchor's size."""

    start: int  # its first token, within its item
    size: int
    minimum: int  # K_min, at least 1
    maximum: int  # K_max, from `minimum` to `size`


class AnchorWalk(NamedTuple):
    """How the anchors of U units grew, rank by rank. Behind a unit's K_max nothing is counted."""

    token: Tensor  # [U, ranks] int64: the tokens by falling relevance, counted over all items
    novel: Tensor  # [U, ranks] bool: behind the first K_min, and far from all of those
    kept: Tensor  # [U, ranks] bool: the anchor


def relevance_anchors(
    relevance: Sequence[Tensor],
    features: Sequence[Tensor],
    units: Sequence[Sequence[Unit]],
    tau: float,
    patience: int,
) -> list[Tensor]:
    """Mark the anchor tokens of every unit of every item: arguments of `walk_ranks`.

    Returns:
        Per item [N_i] bool.
    """
    walk = walk_ranks(relevance, features, units, tau, patience)
    lengths = [len(scores) for scores in relevance]
    total = sum(lengths)
    # One more than there are tokens: ranks that are out write to that one.
    anchor = torch.zeros(total + 1, dtype=torch.bool, device=walk.kept.device)
    anchor.scatter_(0, torch.where(walk.kept, walk.token, total).flatten(), True)
    return list(torch.split(anchor[:total], lengths))


def walk_ranks(
    relevance: Sequence[Tensor],
    features: Sequence[Tensor],
    units: Sequence[Sequence[Unit]],
    tau: float,
    patience: int,
) -> AnchorWalk:
    """Grow the anchors of every unit of every item; the plain form, which others are held to.

    Args:
        relevance: per item [N_i], larger is more relevant.
        features: per item [N_i, D], the space in which novelty is measured.
        units: per item, the units that have an anchor; at least one.
        tau: cosine distance above which a token counts as novel.
        patience: number of novel tokens at which the anchor ends.
    """
    ranking = rank_units(relevance, units)
    minimum, maximum, offset = ranking.bounds[:, 2:, None].unbind(1)
    seeds = max(unit.minimum for group in units for unit in group)
    rank = torch.arange(ranking.token.shape[1], device=minimum.device)

    # 1. Novelty of every rank: the distance to the nearest of the first K_min [U, ranks].
    counts = [len(group) for group in units]
    rows = [
        item_features[index.flatten()]
        for item_features, index in zip(features, ranking.token.split(counts), strict=True)
    ]
    unit_features = unit_rows(torch.cat(rows)).reshape(*ranking.token.shape, -1)
    to_seeds = distances(unit_features, unit_features[:, :seeds])  # [U, ranks, seeds]
    novelty = to_seeds.masked_fill((rank[:seeds] >= minimum)[:, None], torch.inf).amin(2)

    # 2. A rank is in while fewer than `patience` novel ones came before it.
    novel = (novelty > tau) & (rank >= minimum)
    before = novel.cumsum(1) - novel.long()
    kept = (rank < minimum) | ((rank < maximum) & (before < patience))
    return AnchorWalk(offset + ranking.token, novel, kept)


class Ranking(NamedTuple):
    """The tokens of U units by falling relevance, as far as an anchor can reach."""

    bounds: Tensor  # [U, 5] int64: a `Unit`, and where its item begins among the tokens of all
    token: Tensor  # [U, ranks] int64, counted within the item; behind a unit's end, any of them


def rank_units(relevance: Sequence[Tensor], units: Sequence[Sequence[Unit]]) -> Ranking:
    """Rank the tokens within each unit, ties to the lower index; all units in one padded batch.

    Every shape follows from `units`, which the host knows: the host never waits for the device.

    Args:
        relevance: per item [N_i], larger is more relevant.
        units: per item, the units that have an anchor; at least one.
    """
    lengths = [len(scores) for scores in relevance]
    offsets = [sum(lengths[:item]) for item in range(len(lengths))]
    table = [(*unit, offsets[item]) for item, group in enumerate(units) for unit in group]
    longest = max(row[1] for row in table)
    ranks = max(row[3] for row in table)
    device = relevance[0].device
    bounds = to_device(table, device)
    first, size, _, _, offset = bounds[:, :, None].unbind(1)

    # Padding is last: -inf, as a score that is not a number, and behind those because its index is
    # higher.
    place = torch.arange(longest, device=device)
    scores = torch.cat(list(relevance)).to(working_dtype(device))
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    scores = scores[(offset + first + place).clamp_max(sum(lengths) - 1)]
    scores = scores.masked_fill(place >= size, -torch.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :ranks]
    return Ranking(bounds, first + order.minimum(size - 1))

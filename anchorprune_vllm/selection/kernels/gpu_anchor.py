# SPDX-License-Identifier: Apache-2.0
"""Stage 1 on a GPU: one kernel for the novelty of ranks, one to find where anchors end.

Neither kernel depends on what else is in the batch, so a unit has the same anchor alone and among
others, and on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.selection.exact_cosine import working_dtype
from anchorprune_vllm.selection.units import Unit

MARK = {"BLOCK": 256, "num_warps": 2}
ROUNDING: tl.constexpr = tl.constexpr(1e-6)


def relevance_anchors(
    relevance: Sequence[Tensor],
    features: Sequence[Tensor],
    units: Sequence[Sequence[Unit]],
    tau: float,
    patience: int,
) -> list[Tensor]:
    """Return the anchors of all units of all items, as `anchorprune.relevance_anchor` finds them.

    Args:
        relevance: The relevance of each item's tokens, [N_i]; larger is more relevant.
        features: The features of each item with which novelty is measured, [N_i, D].
        units: The units of each item that have an anchor, at least one.
        tau: The cosine distance above which a token counts as novel.
        patience: The number of novel tokens at which an anchor ends.

    Returns:
        A mask [N_i] for each item.
    """
    ranking = rank_units(relevance, units)
    count, ranks = ranking.token.shape
    rows = features[0].contiguous() if len(features) == 1 else torch.cat(list(features))
    novelty = torch.empty(count, ranks, dtype=torch.float32, device=rows.device)
    anchor = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    tiles = tile_sizes(rows.dtype)
    with torch.cuda.device_of(rows):
        measure_novelty[(triton.cdiv(ranks, tiles["RANKS"]), count)](
            *(rows, ranking.bounds, ranking.token, novelty, rows.shape[1], ranks), **tiles
        )
        mark_anchors[(count,)](
            *(ranking.bounds, ranking.token, novelty, anchor, float(tau), patience, ranks), **MARK
        )
    return list(anchor.split([len(scores) for scores in relevance]))


class Ranking(NamedTuple):
    """The tokens of U units by descending relevance, as far as an anchor can reach."""

    bounds: Tensor  # [U, 5] int64: a `Unit`, and the index of its item's first token among all
    token: Tensor  # [U, ranks] int64, counted within the item; arbitrary after a unit's end


def rank_units(relevance: Sequence[Tensor], units: Sequence[Sequence[Unit]]) -> Ranking:
    """Rank the tokens within each unit, in one padded batch; ties go to the lower index.

    All shapes follow from `units`, which the host knows, so it never waits for the device.

    Args:
        relevance: The relevance of each item's tokens, [N_i]; larger is more relevant.
        units: The units of each item that have an anchor, at least one.
    """
    lengths = [len(scores) for scores in relevance]
    offsets = [sum(lengths[:item]) for item in range(len(lengths))]
    table = [(*unit, offsets[item]) for item, group in enumerate(units) for unit in group]
    longest = max(row[1] for row in table)
    ranks = max(row[3] for row in table)
    device = relevance[0].device
    bounds = to_device(table, device)
    first, size, _, _, offset = bounds[:, :, None].unbind(1)

    # Padding comes last: it is -inf like NaN scores, and comes after them by its higher index.
    place = torch.arange(longest, device=device)
    scores = torch.cat(list(relevance)).to(working_dtype(device))
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    scores = scores[(offset + first + place).clamp_max(sum(lengths) - 1)]
    scores = scores.masked_fill(place >= size, -torch.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :ranks]
    return Ranking(bounds, first + order.minimum(size - 1))


def tile_sizes(dtype: torch.dtype) -> dict[str, int]:
    """Return the tiles of `measure_novelty`; float32 is multiplied without tensor cores."""
    depth = 128 if dtype.itemsize == 2 else 32
    return {"RANKS": 32, "SEEDS": 16, "DEPTH": depth, "num_warps": 4, "num_stages": 3}


@triton.jit(do_not_specialize=["ranks"])
def measure_novelty(
    rows: tl.tensor,  # [T, D]
    bounds: tl.tensor,  # [U, 5] int64, from `Ranking`
    tokens: tl.tensor,  # [U, ranks] int64, from `Ranking`
    novelty: tl.tensor,  # [U, ranks] float32, written: the distance to the nearest of the K_min
    width: tl.tensor,  # D
    ranks: tl.tensor,
    RANKS: tl.constexpr,
    SEEDS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Compute the distances of a block of a unit's ranks to the nearest of its first K_min."""
    unit = tl.program_id(1)
    minimum = tl.load(bounds + 5 * unit + 2).to(tl.int32)
    offset = tl.load(bounds + 5 * unit + 4)
    tokens += unit * ranks
    rank = tl.program_id(0) * RANKS + tl.arange(0, RANKS)
    own = offset + tl.load(tokens + rank, mask=rank < ranks, other=0)
    column = tl.arange(0, DEPTH)
    nearest = tl.full([RANKS], float("inf"), tl.float32)
    for start in range(0, minimum, SEEDS):
        seed = start + tl.arange(0, SEEDS)
        other = offset + tl.load(tokens + seed, mask=seed < minimum, other=0)
        products = tl.zeros([RANKS, SEEDS], tl.float32)
        own_square = tl.zeros([RANKS], tl.float32)
        other_square = tl.zeros([SEEDS], tl.float32)
        for depth in range(0, width, DEPTH):
            inside = (depth + column < width)[None, :]
            place = depth + column[None, :]
            one = tl.load(rows + own[:, None] * width + place, mask=inside, other=0.0)
            two = tl.load(rows + other[:, None] * width + place, mask=inside, other=0.0)
            products = tl.dot(one, tl.trans(two), products, input_precision="ieee")
            own_square += tl.sum(one.to(tl.float32) * one.to(tl.float32), 1)
            other_square += tl.sum(two.to(tl.float32) * two.to(tl.float32), 1)
        # A row without a direction, zero or not finite, has the cosine 0 with everything.
        own_points = (own_square > 0) & (own_square < float("inf"))
        other_points = (other_square > 0) & (other_square < float("inf"))
        has_direction = own_points[:, None] & other_points[None, :]
        length = tl.sqrt_rn(own_square)[:, None] * tl.sqrt_rn(other_square)[None, :]
        cosine = tl.div_rn(products, tl.where(has_direction, length, 1.0))
        distance = tl.where(has_direction, 1 - cosine, 1.0)
        # Squares and products are summed in different orders, so a copy may seem slightly away.
        distance = tl.where(distance < ROUNDING, 0.0, distance)
        distance = tl.where((seed < minimum)[None, :], distance, float("inf"))
        nearest = tl.minimum(nearest, tl.min(distance, 1))
    tl.store(novelty + unit * ranks + rank, nearest, mask=rank < ranks)


@triton.jit(do_not_specialize=["patience", "ranks"])
def mark_anchors(
    bounds: tl.tensor,  # [U, 5] int64, from `Ranking`
    tokens: tl.tensor,  # [U, ranks] int64, from `Ranking`
    novelty: tl.tensor,  # [U, ranks] float32
    anchor: tl.tensor,  # [T] bool, written where it is true
    tau: tl.tensor,
    patience: tl.tensor,
    ranks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Mark the anchor of one unit: ranks with fewer than `patience` novel ones before them."""
    unit = tl.program_id(0)
    minimum = tl.load(bounds + 5 * unit + 2).to(tl.int32)
    maximum = tl.load(bounds + 5 * unit + 3).to(tl.int32)
    offset = tl.load(bounds + 5 * unit + 4)
    before = 0
    for start in range(0, maximum, BLOCK):
        rank = start + tl.arange(0, BLOCK)
        inside = rank < maximum
        distance = tl.load(novelty + unit * ranks + rank, mask=inside, other=0.0)
        novel = ((distance > tau) & (rank >= minimum) & inside).to(tl.int32)
        came = before + tl.cumsum(novel, 0) - novel
        is_kept = inside & ((rank < minimum) | (came < patience))
        token = offset + tl.load(tokens + unit * ranks + rank, mask=inside, other=0)
        tl.store(anchor + token, is_kept, mask=is_kept)
        before += tl.sum(novel, 0)

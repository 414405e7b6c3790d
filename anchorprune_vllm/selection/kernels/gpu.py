# SPDX-License-Identifier: Apache-2.0
"""Stage 2 on a GPU: one kernel for the distances of all pairs of tokens, one for the greedy loop.

The distances of an item are computed once, by products on tensor cores, and stored as an N x N
matrix in a workspace of bounded size. The greedy loop is one program per item: each step reads one
row of that matrix, and its threads synchronise only to find the best score.

Neither kernel depends on what else is in the batch, so an item keeps the same tokens alone and
among others, and on every rank. The products of copies of a token are equal to the last bit, and
their distance is exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anchorprune_vllm.selection.anchorprune import contextual_expansion
from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.selection.scores import Score

WORKSPACE_BYTES = 2**30
"""The memory for the distances of all pairs. It holds those of one item of 16,384 tokens, which is
the largest image of a Qwen2.5-VL as published, or of 809 items of 576 tokens."""

ORDER = {"BLOCK": 64, "num_warps": 4}
LAST_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)


class Expansion(NamedTuple):
    """The chosen tokens of several items, concatenated."""

    chosen: Tensor  # [sum of K] int64; for each item the anchor, then the order of choice
    ascending: Tensor  # [sum of K] int64; the same tokens in native order
    is_anchor: Tensor  # [sum of K] bool; which of `ascending` are the anchor


class Item(NamedTuple):
    """The places of an item's tokens, distances and results."""

    first: int  # the index of its first token among those of all items
    tokens: int  # N
    place: int  # the offset of its distances in the workspace
    budget: int  # K
    result: int  # the offset of its first result


def fits(tokens: int) -> bool:
    """Return whether the distances of an item with this many tokens fit in the workspace."""
    return 4 * tokens**2 <= WORKSPACE_BYTES


def expand(
    rows: Tensor, sizes: Sequence[int], score: Score, anchor: Tensor, budgets: Sequence[int]
) -> Expansion:
    """Choose the tokens of several items at once, each as `contextual_expansion` does.

    An item too large for the workspace uses the plain form, whose memory grows linearly.

    Args:
        rows: The tokens of all items, concatenated, [T, D].
        sizes: The number of tokens of each item, T in total.
        score: The score of tokens, with weights [T].
        anchor: The mask [T] of anchors.
        budgets: K of each item.
    """
    rows = rows.contiguous()
    compile_for(rows.device, rows.dtype, rows.shape[1], score.adds)
    return _expand(rows, sizes, score, anchor, budgets)


@cache
def compile_for(device: torch.device, dtype: torch.dtype, width: int, adds: bool) -> None:
    """Compile the kernels for rows of a dtype and width, for items of all sizes.

    A server is thus warm after its first item, whatever its size.
    """
    row = torch.zeros(1, width, dtype=dtype, device=device)
    score = Score(torch.zeros(1, dtype=torch.float32, device=device), adds)
    anchor = torch.zeros(1, dtype=torch.bool, device=device)
    room = 1
    while fits(room):
        _expand(row, [1], score, anchor, [1], room)
        room = loop_sizes(room)["BLOCK"] + 1


def _expand(
    rows: Tensor,
    sizes: Sequence[int],
    score: Score,
    anchor: Tensor,
    budgets: Sequence[int],
    room: int = 1,
) -> Expansion:
    """Do what `expand` does, with a loop for items of at least `room` tokens."""
    squares = rows.new_empty(len(rows), dtype=torch.float32)
    # These are not parts of one tensor, because Triton compiles again for unaligned pointers.
    chosen = rows.new_empty(sum(budgets), dtype=torch.int64)
    ascending = torch.empty_like(chosen)
    is_anchor = rows.new_empty(sum(budgets), dtype=torch.bool)
    tiles = tile_sizes(rows.dtype)
    with torch.cuda.device_of(rows):
        for group in groups(sizes, budgets):
            items = to_device(group, rows.device)
            longest = max(item.tokens for item in group)
            if fits(longest):
                last = group[-1]
                distances = rows.new_empty(last.place + last.tokens**2, dtype=torch.float32)
                across = triton.cdiv(longest, tiles["BLOCK"])
                for only_squares, programs in ((True, across), (False, across**2)):
                    pair_distances[(programs, len(group))](
                        *(rows, squares, distances, items, rows.shape[1]),
                        ONLY_SQUARES=only_squares,
                        **tiles,
                    )
                choose[(len(group),)](
                    *(distances, score.weight, anchor, items, chosen),
                    ADDS=score.adds,
                    **loop_sizes(max(longest, room)),
                )
            else:
                (item,) = group
                tokens = slice(item.first, item.first + item.tokens)
                chosen[item.result : item.result + item.budget] = contextual_expansion(
                    rows[tokens],
                    Score(score.weight[tokens], score.adds),
                    anchor[tokens],
                    item.budget,
                )
            blocks = triton.cdiv(max(item.budget for item in group), ORDER["BLOCK"])
            put_in_native_order[(blocks, len(group))](
                *(chosen, anchor, items, ascending, is_anchor), **ORDER
            )
    return Expansion(chosen, ascending, is_anchor)


def tile_sizes(dtype: torch.dtype) -> dict[str, int]:
    """Return the tiles of `pair_distances`; float32 is multiplied without tensor cores."""
    if dtype.itemsize == 2:
        return {"BLOCK": 64, "DEPTH": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK": 64, "DEPTH": 32, "num_warps": 8, "num_stages": 2}


def loop_sizes(tokens: int) -> dict[str, int]:
    """Return the block size of `choose` for items of up to `tokens` tokens."""
    block = max(1024, triton.next_power_of_2(tokens))
    return {"BLOCK": block, "num_warps": min(32, block // 128)}


def groups(sizes: Sequence[int], budgets: Sequence[int]) -> Iterator[list[Item]]:
    """Group consecutive items whose distances fit in the workspace; too large ones are alone."""
    group: list[Item] = []
    first = place = result = 0
    for size, budget in zip(sizes, budgets, strict=True):
        if group and 4 * (place + size**2) > WORKSPACE_BYTES:
            yield group
            group, place = [], 0
        group.append(Item(first, size, place, budget, result))
        first, place, result = first + size, place + size**2, result + budget
    yield group


@triton.jit
def pair_distances(
    rows: tl.tensor,  # [T, D]
    squares: tl.tensor,  # [T] float32: written if ONLY_SQUARES, else read
    distances: tl.tensor,  # float32, written: [N, N] for each item, concatenated
    items: tl.tensor,  # [B, 5] int64, an `Item` each
    width: tl.tensor,  # D
    ONLY_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Compute the distances of two blocks of an item's rows, summing in one order for all pairs."""
    items += 5 * tl.program_id(1)
    first = tl.load(items)
    rows += first * width
    squares += first
    tokens = tl.load(items + 1).to(tl.int32)  # within an item, 32 bits are enough
    distances += tl.load(items + 2)
    across = tl.cdiv(tokens, BLOCK)
    tile = tl.program_id(0)
    if ONLY_SQUARES:
        tile *= across + 1  # the diagonal
    own_tile, other_tile = tile // across, tile % across
    if (own_tile < across) & (own_tile <= other_tile):  # other tiles are transposes of these
        own = own_tile * BLOCK + tl.arange(0, BLOCK)
        other = other_tile * BLOCK + tl.arange(0, BLOCK)
        column = tl.arange(0, DEPTH)
        own_rows = rows + own[:, None] * width + column[None, :]
        other_rows = rows + other[:, None] * width + column[None, :]
        products = tl.zeros([BLOCK, BLOCK], tl.float32)
        for start in range(0, width, DEPTH):
            inside = (column < width - start)[None, :]
            one = tl.load(own_rows + start, mask=(own < tokens)[:, None] & inside, other=0.0)
            two = tl.load(other_rows + start, mask=(other < tokens)[:, None] & inside, other=0.0)
            products = tl.dot(one, tl.trans(two), products, input_precision="ieee")
        if ONLY_SQUARES:
            square = tl.sum(tl.where(own[:, None] == other[None, :], products, 0.0), 1)
            tl.store(squares + own, square, mask=own < tokens)
        else:
            own_square = tl.load(squares + own, mask=own < tokens, other=0.0)
            other_square = tl.load(squares + other, mask=other < tokens, other=0.0)
            # A row without a direction, zero or not finite, has the cosine 0 with everything.
            own_points = (own_square > 0) & (own_square < float("inf"))
            other_points = (other_square > 0) & (other_square < float("inf"))
            has_direction = own_points[:, None] & other_points[None, :]
            # The product of two copies equals their squares, so the quotient is exactly 1.
            length = tl.where(
                own_square[:, None] == other_square[None, :],
                own_square[:, None],
                tl.sqrt_rn(own_square)[:, None] * tl.sqrt_rn(other_square)[None, :],
            )
            length = tl.where(has_direction, length, 1.0)
            cosine = tl.where(has_direction, tl.div_rn(products, length), 0.0)
            distance = tl.maximum(1 - cosine, 0.0)
            tl.store(
                distances + own[:, None] * tokens + other[None, :],
                distance,
                mask=(own < tokens)[:, None] & (other < tokens)[None, :],
            )
            tl.store(
                distances + other[:, None] * tokens + own[None, :],
                tl.trans(distance),
                mask=(other < tokens)[:, None] & (own < tokens)[None, :],
            )


@triton.jit
def choose(
    distances: tl.tensor,  # float32, from `pair_distances`
    weights: tl.tensor,  # [T] float32
    anchor: tl.tensor,  # [T] bool
    items: tl.tensor,  # [B, 5] int64, an `Item` each
    chosen: tl.tensor,  # int64, written: K of each item, the anchor, then the order of choice
    ADDS: tl.constexpr,  # whether a score is weight plus novelty, or weight times novelty
    BLOCK: tl.constexpr,  # a power of 2, N or more
) -> None:
    """Choose the tokens of one item, each the best given those before it; the lower index of ties.

    The state of all tokens stays in registers. A step reads one row of distances, and threads
    synchronise only to find the best score.
    """
    items += 5 * tl.program_id(0)
    first = tl.load(items)
    tokens = tl.load(items + 1).to(tl.int32)  # within an item, 32 bits are enough
    distances += tl.load(items + 2)
    budget = tl.load(items + 3).to(tl.int32)
    result = tl.load(items + 4)
    token = tl.arange(0, BLOCK)
    exists = token < tokens
    # Tokens that are taken or do not exist score below zero, and so below all others.
    TAKEN: tl.constexpr = -float("inf") if ADDS else -1.0
    novelty = tl.where(exists, 2.0, TAKEN)

    # 1. The anchor, in native order.
    waits = tl.load(anchor + first + token, mask=exists, other=0) != 0
    anchored = tl.sum(waits.to(tl.int32), 0)
    for step in range(0, anchored):
        choice = tl.min(tl.where(waits, token, LAST_TOKEN), 0)
        tl.store(chosen + result + step, choice.to(tl.int64))
        waits = waits & (token != choice)
        novelty = novelty_after(novelty, choice, token, exists, distances, tokens, TAKEN)

    # 2. The context: each choice is the best given those before it.
    weight = tl.load(weights + first + token, mask=exists, other=0.0)
    for step in range(anchored, budget):
        score = weight + novelty if ADDS else weight * novelty
        # Read as integers, the bits of positive floats have the order of the floats, and exceed
        # those of all negative ones. The lower bits hold the token: the lower index wins ties.
        bits = score.to(tl.int32, bitcast=True).to(tl.int64)
        best = tl.max((bits << 32) | (LAST_TOKEN - token), 0)
        choice = LAST_TOKEN - (best & LAST_TOKEN).to(tl.int32)
        tl.store(chosen + result + step, choice.to(tl.int64))
        novelty = novelty_after(novelty, choice, token, exists, distances, tokens, TAKEN)


@triton.jit
def novelty_after(
    novelty: tl.tensor,  # [BLOCK] float32
    choice: tl.tensor,
    token: tl.tensor,  # [BLOCK]
    exists: tl.tensor,  # [BLOCK] bool
    distances: tl.tensor,  # [N, N] float32
    tokens: tl.tensor,  # N
    TAKEN: tl.constexpr,
) -> tl.tensor:
    """Return the novelty of tokens after a choice: the smaller of the old one and its distance."""
    distance = tl.load(distances + choice * tokens + token, mask=exists, other=2.0)
    return tl.where(token == choice, TAKEN, tl.minimum(novelty, distance))


@triton.jit
def put_in_native_order(
    chosen: tl.tensor,  # int64, from `choose`
    anchor: tl.tensor,  # [T] bool
    items: tl.tensor,  # [B, 5] int64, an `Item` each
    ascending: tl.tensor,  # int64, written: K of each item in native order
    is_anchor: tl.tensor,  # bool, written: which of those are the anchor
    BLOCK: tl.constexpr,
) -> None:
    """Put a block of an item's choices in native order, each after all with a lower index."""
    items += 5 * tl.program_id(1)
    first = tl.load(items)
    budget = tl.load(items + 3).to(tl.int32)
    result = tl.load(items + 4)
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(chosen + result + own, mask=own < budget, other=0)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, budget, BLOCK):
        other = start + tl.arange(0, BLOCK)
        # Places beyond the budget get the largest index, so they come before no token.
        others = tl.load(chosen + result + other, mask=other < budget, other=LAST_TOKEN)
        place += tl.sum((others[None, :] < token[:, None]).to(tl.int32), 1)
    tl.store(ascending + result + place, token, mask=own < budget)
    in_anchor = tl.load(anchor + first + token, mask=own < budget, other=0)
    tl.store(is_anchor + result + place, in_anchor, mask=own < budget)

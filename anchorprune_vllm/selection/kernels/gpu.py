# SPDX-License-Identifier: Apache-2.0
"""Stage 2 on a GPU: the distances of all pairs of tokens, then the greedy loop, a kernel each.

The distances of an item are made once, by products on tensor cores, and kept as a matrix N x N in a
workspace of bounded size. The greedy loop is one program per item: each step reads one row of that
matrix, and its threads meet only to find the best score.

Neither kernel depends on what else is in the batch, so an item keeps the same tokens alone and
among others, and on every rank. The products of copies of a token are equal to the last bit, and
their distance is exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anchorprune_vllm.selection.expand import MAX_DISTANCE, Expansion, Score
from anchorprune_vllm.selection.host import to_device

WORKSPACE_BYTES = 512 * 2**20
"""For the distances of all pairs: those of one item of 11,585 tokens, or of 404 of 576."""

LOOP = {"BLOCK": 4096, "num_warps": 16}
LAST_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)

_WAITS = 4.0  # the novelty of an anchor token before it is chosen: beyond all distances


class Item(NamedTuple):
    """Where an item's tokens, distances and results are."""

    first: int  # its first token, counted over all items
    tokens: int  # N
    place: int  # of its distances in the workspace
    budget: int  # K
    result: int  # the place of its first result


def fits(tokens: int) -> bool:
    """Return whether an item of so many tokens has its products in the workspace."""
    return 4 * tokens**2 <= WORKSPACE_BYTES


def expand(
    rows: Tensor, sizes: Sequence[int], score: Score, anchor: Tensor, budgets: Sequence[int]
) -> Expansion:
    """Choose the tokens of items that fit: `expand.expand_one_by_one`, all items at once."""
    rows = rows.contiguous()
    squares = rows.new_empty(len(rows), dtype=torch.float32)
    novelty = torch.where(anchor, _WAITS, MAX_DISTANCE)
    chosen, ascending = rows.new_empty(2, sum(budgets), dtype=torch.int64)
    is_anchor = rows.new_empty(sum(budgets), dtype=torch.bool)
    tiles = tile_sizes(rows.dtype)
    with torch.cuda.device_of(rows):
        for group in groups(sizes, budgets):
            items = to_device(group, rows.device)
            longest = max(item.tokens for item in group)
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
                distances,
                score.factor,
                score.factor if score.addend is None else score.addend,
                *(novelty, anchor, items, chosen, ascending, is_anchor),
                HAS_ADDEND=score.addend is not None,
                **LOOP,
            )
    return Expansion(chosen, ascending, is_anchor)


def tile_sizes(dtype: torch.dtype) -> dict[str, int]:
    """Return the tiles of `pair_distances`; float32 is multiplied without tensor cores."""
    if dtype.itemsize == 2:
        return {"BLOCK": 64, "DEPTH": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK": 64, "DEPTH": 32, "num_warps": 8, "num_stages": 2}


def groups(sizes: Sequence[int], budgets: Sequence[int]) -> Iterator[list[Item]]:
    """Cut items into runs whose distances fit the workspace together."""
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
    distances: tl.tensor,  # float32, written: [N, N] of each item, one behind the other
    items: tl.tensor,  # [B, 5] int64, of each item an `Item`
    width: tl.tensor,  # D
    ONLY_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Multiply a block of an item's rows with another one, in the same order for every pair."""
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
    if tile < across * across:
        own = tile // across * BLOCK + tl.arange(0, BLOCK)
        other = tile % across * BLOCK + tl.arange(0, BLOCK)
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
            lengths = own_square[:, None] * other_square[None, :]
            # The quotient of copies is exactly 1. A row without a direction, zero or not finite,
            # has the cosine 0 with everything.
            has_direction = (lengths > 0) & (lengths < float("inf"))
            length = tl.sqrt_rn(tl.where(has_direction, lengths, 1.0))
            cosine = tl.where(has_direction, tl.div_rn(products, length), 0.0)
            tl.store(
                distances + own[:, None] * tokens + other[None, :],
                tl.maximum(1 - cosine, 0.0),
                mask=(own < tokens)[:, None] & (other < tokens)[None, :],
            )


@triton.jit
def choose(
    distances: tl.tensor,  # float32, of `pair_distances`
    factor: tl.tensor,  # [T] float32
    addend: tl.tensor,  # [T] float32, if there is one
    novelty: tl.tensor,  # [T] float32, changed: 4 for the anchor, 2 for the others
    anchor: tl.tensor,  # [T] bool
    items: tl.tensor,  # [B, 5] int64, of each item an `Item`
    chosen: tl.tensor,  # int64, written: K of each item, the anchor first, then in order of choice
    ascending: tl.tensor,  # int64, written: the same in native order
    is_anchor: tl.tensor,  # bool, written: which of those are the anchor
    HAS_ADDEND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Choose the tokens of one item, each the best given those before it; ties: lower index."""
    items += 5 * tl.program_id(0)
    first = tl.load(items)
    factor += first
    addend += first
    novelty += first
    anchor += first
    tokens = tl.load(items + 1).to(tl.int32)  # within an item, 32 bits are enough
    distances += tl.load(items + 2)
    budget = tl.load(items + 3).to(tl.int32)
    result = tl.load(items + 4)
    chosen += result
    ascending += result
    is_anchor += result
    in_block = tl.arange(0, BLOCK)

    readable = 0  # distances to the last choice: none before the first
    choice = 0
    for step in range(budget):
        best = tl.full([BLOCK], -1, tl.int64)
        for start in range(0, tokens, BLOCK):
            # 1. The kept set is now as near as the last choice, or as near as it was. Beyond all
            #    distances, the anchor waits for its choice; what is taken has less than any.
            token = start + in_block
            exists = token < tokens
            row = distances + choice * tokens
            distance = tl.load(row + token, mask=token < readable, other=2.0)
            nearest = tl.load(novelty + token, mask=exists, other=-1.0)
            nearest = tl.where(nearest > 2, nearest, tl.minimum(nearest, distance))
            is_choice = (token == choice) & (token < readable)
            nearest = tl.where(is_choice, -1.0, nearest)
            tl.store(novelty + token, nearest, mask=exists)
            # 2. Score. Behind the bits of a float that is not negative, which order it as they
            #    would order a whole number, comes the token: the lower wins ties.
            score = tl.load(factor + token, mask=exists, other=0.0) * nearest
            if HAS_ADDEND:
                score += tl.load(addend + token, mask=exists, other=0.0)
            score = tl.where(nearest > 2, float("inf"), tl.abs(score))
            bits = score.to(tl.int32, bitcast=True).to(tl.int64)
            key = (bits << 32) | (LAST_TOKEN - token)
            best = tl.maximum(best, tl.where(nearest < 0, -1, key))
        # 3. Choose. All threads meet here, and see below what they have stored above.
        choice = LAST_TOKEN - (tl.max(best, 0) & LAST_TOKEN).to(tl.int32)
        readable = tokens
        tl.store(chosen + step, choice.to(tl.int64))

    # 4. Native order: a token's place is the number of kept ones before it.
    before = 0
    for start in range(0, tokens, BLOCK):
        token = start + in_block
        exists = token < tokens
        nearest = tl.load(novelty + token, mask=exists, other=0.0)
        is_kept = exists & ((nearest < 0) | (token == choice))
        place = before + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(ascending + place, token.to(tl.int64), mask=is_kept)
        tl.store(is_anchor + place, tl.load(anchor + token, mask=is_kept, other=0), mask=is_kept)
        before += tl.sum(is_kept.to(tl.int32), 0)

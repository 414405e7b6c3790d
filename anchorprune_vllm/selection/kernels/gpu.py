# SPDX-License-Identifier: Apache-2.0
"""The greedy loop of a batch in one Triton kernel: a program for each item, nothing for the host.

Lazy as on a CPU (`cpu.py`): old scores are upper bounds, and only the token on top is compared with
what was kept since it was last looked at. A step then reads some rows instead of all of them. The
scores lie in blocks, of which the best is known, so that finding the top reads one block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anchorprune_vllm.selection.cosine import half_squares
from anchorprune_vllm.selection.expand import FARTHEST, Worth

SIZES = {"BLOCK_TOKENS": 256, "BLOCK_WIDTH": 128, "BLOCK_KEPT": 16}
FEWEST_BLOCKS = 128  # up to 32,768 tokens by one compiled kernel


def lazy_expansion(
    rows: Tensor, worth: Worth, novelty: Tensor, taken: Tensor, steps: Tensor, most: int
) -> Tensor:
    """`greedy_expansion`, for factors that are not negative.

    Args:
        rows: [B, N, D] of `unit_rows`.
        worth: [B, N] each, float64.
        novelty: [B, N] float64 of `novelty_to_anchor`.
        taken: [B, N] bool, tokens that cannot be chosen.
        steps: [B] int64, how many tokens to choose of each item; as many are left.
        most: no item has more steps than this.

    Returns:
        [B, most] int64, in the order of choice; N behind the last.
    """
    items, tokens, width = rows.shape
    score = worth.of(novelty).masked_fill_(taken, -torch.inf)
    choices = torch.full((items, most), tokens, device=rows.device)
    blocks = max(FEWEST_BLOCKS, triton.next_power_of_2(triton.cdiv(tokens, SIZES["BLOCK_TOKENS"])))
    with torch.cuda.device_of(rows):
        expand[(items,)](
            rows.float(),  # exact: multiples of 2^-24
            half_squares(rows),
            worth.factor.contiguous(),
            score if worth.addend is None else worth.addend.contiguous(),
            score,
            novelty.clone(memory_format=torch.contiguous_format),
            torch.zeros_like(score, dtype=torch.int32),
            steps,
            choices,
            tokens,
            width,
            most,
            FARTHEST,
            HAS_ADDEND=worth.addend is not None,
            BLOCKS=blocks,
            **SIZES,
        )
    return choices


# Compiled once, whatever the sizes.
@triton.jit(do_not_specialize=["tokens", "width", "most"])
def expand(
    rows: tl.tensor,  # [B, N, D] float32
    halves: tl.tensor,  # [B, N] float64, half the squares of the rows
    factor: tl.tensor,  # [B, N] float64
    addend: tl.tensor,  # [B, N] float64, if there is one
    score: tl.tensor,  # [B, N] float64, changed
    novelty: tl.tensor,  # [B, N] float64, changed
    compared: tl.tensor,  # [B, N] int32, zeros: with how many of the choices a token was compared
    steps: tl.tensor,  # [B] int64
    choices: tl.tensor,  # [B, most] int64, written
    tokens: tl.tensor,
    width: tl.tensor,
    most: tl.tensor,
    farthest: tl.tensor,
    HAS_ADDEND: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
) -> None:
    item = tl.program_id(0).to(tl.int64)
    rows += item * tokens * width
    halves += item * tokens
    factor += item * tokens
    addend += item * tokens
    score += item * tokens
    novelty += item * tokens
    compared += item * tokens
    choices += item * most
    wanted = tl.load(steps + item)
    in_block = tl.arange(0, BLOCK_TOKENS)
    number = tl.arange(0, BLOCKS)

    # 1. The best score of each block.
    best = tl.full([BLOCKS], float("-inf"), tl.float64)
    for block in range(tl.cdiv(tokens, BLOCK_TOKENS)):
        at = block * BLOCK_TOKENS + in_block
        scores = tl.load(score + at, mask=at < tokens, other=float("-inf"))
        best = tl.where(number == block, tl.max(scores, 0), best)

    count = tl.zeros([], tl.int64)
    while count < wanted:
        # 2. The token on top; of equals the lower one.
        block = tl.argmax(best, 0, tie_break_left=True)
        at = block * BLOCK_TOKENS + in_block
        scores = tl.load(score + at, mask=at < tokens, other=float("-inf"))
        token = (block * BLOCK_TOKENS + tl.argmax(scores, 0, tie_break_left=True)).to(tl.int64)
        seen = tl.load(compared + token).to(tl.int64)
        if seen == count:
            # 3. Nothing was chosen since its score was computed: it is the choice.
            tl.store(choices + count, token)
            tl.store(score + token, float("-inf"))
            count += 1
        else:
            # 4. Its distance to the next few of the choices.
            place = seen + tl.arange(0, BLOCK_KEPT)
            kept = tl.load(choices + place, mask=place < count, other=0)
            product = tl.zeros([BLOCK_KEPT], tl.float64)
            for first in range(0, width, BLOCK_WIDTH):
                column = first + tl.arange(0, BLOCK_WIDTH)
                row = tl.load(rows + token * width + column, mask=column < width, other=0.0)
                others = tl.load(
                    rows + kept[:, None] * width + column[None, :],
                    mask=(place < count)[:, None] & (column < width)[None, :],
                    other=0.0,
                )
                product += tl.sum(others.to(tl.float64) * row.to(tl.float64)[None, :], 1)
            distance = tl.load(halves + token) + tl.load(halves + kept) - product
            distance = tl.where(place < count, distance, farthest)
            nearest = tl.minimum(tl.load(novelty + token), tl.min(distance, 0))
            worth = tl.load(factor + token) * nearest
            if HAS_ADDEND:
                worth += tl.load(addend + token)
            tl.store(novelty + token, nearest)
            tl.store(score + token, worth)
            tl.store(compared + token, tl.minimum(seen + BLOCK_KEPT, count).to(tl.int32))
        # One thread has written what all of them read next.
        tl.debug_barrier()
        scores = tl.load(score + at, mask=at < tokens, other=float("-inf"))
        best = tl.where(number == block, tl.max(scores, 0), best)
        tl.debug_barrier()

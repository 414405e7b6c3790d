# SPDX-License-Identifier: Apache-2.0
"""Received attention in two Triton kernels, each launched once for all segments and heads.

The first kernel computes the logarithm of each row's sum; the second divides rows by these sums and
adds up the columns. A program owns some rows (or columns) of one head and goes through the other
side of its segment in order. Nothing is added atomically, so results are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from anchorprune_vllm.selection.device import to_device

# With fewer warps, blocks of float32 would not fit in registers.
LAUNCH = {"num_warps": 8, "num_stages": 2}


def received_attention(query: Tensor, key: Tensor, segments: Sequence[int], scale: float) -> Tensor:
    """Compute `received_in_blocks` on a GPU; the host does not wait for it.

    Query and key are [T, heads, head_size], the lengths of segments add up to T, and the result is
    float32 [T].
    """
    query, key = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key))
    tokens, heads, head_size = query.shape
    sizes = block_sizes(head_size, query.element_size())
    blocks = to_device(_blocks(segments, sizes["OWN"]), query.device)
    log_sums = query.new_empty(heads, tokens, dtype=torch.float32)
    # This is not half of one tensor, because Triton compiles again for unaligned pointers.
    received = torch.empty_like(log_sums)
    for kernel in (row_log_sums, column_means):
        kernel[(len(blocks), heads)](
            *(query, key, log_sums, received, blocks, tokens),
            *(query.stride(0), query.stride(1), key.stride(0), key.stride(1)),
            scale * math.log2(math.e),  # the kernels use powers of two, which GPUs compute natively
            **sizes,
            **LAUNCH,
        )
    return received.sum(0)


def block_sizes(head_size: int, element_size: int) -> dict[str, int]:
    """Return the compile-time constants of the kernels.

    OWN is the number of rows of a program, 32 KiB; OTHER is the number of rows of the other side
    that it loads at a time. With two of those in flight, a multiprocessor of an A100 runs two
    programs. float32 is multiplied without tensor cores and needs more registers, hence fewer rows.
    """
    channels = max(16, triton.next_power_of_2(head_size))
    own = min(256, max(128, 2**15 // channels)) // element_size
    return {"HEAD_SIZE": head_size, "CHANNELS": channels, "OWN": own, "OTHER": own // 2}


def _blocks(segments: Sequence[int], size: int) -> Tensor:
    """Return, for each block of tokens, its segment's start and length and its place in it."""
    blocks = [
        (end - length, length, first)
        for end, length in zip(accumulate(segments), segments, strict=True)
        for first in range(0, length, size)
    ]
    return torch.tensor(blocks, dtype=torch.int32)


@triton.jit(do_not_specialize=["tokens"])
def row_log_sums(
    query: tl.tensor,  # [T, heads, HEAD_SIZE]
    key: tl.tensor,  # the same
    log_sums: tl.tensor,  # [heads, T] float32, written: log2 of the sum of 2^(query . key * scale)
    received: tl.tensor,  # not used
    blocks: tl.tensor,  # [blocks, 3] int32 of `_blocks`
    tokens: tl.tensor,  # T
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    scale: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
) -> None:
    begin, length, first = _block(blocks)
    head = tl.program_id(1)
    query += begin * query_stride + head * query_head_stride
    key += begin * key_stride + head * key_head_stride
    own = _rows(query, query_stride, first, length, OWN, HEAD_SIZE, CHANNELS)
    highest = tl.full([OWN], -float("inf"), tl.float32)
    total = tl.zeros([OWN], tl.float32)
    for start in range(0, length, OTHER):
        other = _rows(key, key_stride, start, length, OTHER, HEAD_SIZE, CHANNELS)
        logits = tl.dot(own, tl.trans(other), input_precision="ieee") * scale
        exists = start + tl.arange(0, OTHER) < length
        logits = tl.where(exists[None, :], logits, -float("inf"))
        new = tl.maximum(highest, tl.max(logits, 1))
        total = total * tl.exp2(highest - new) + tl.sum(tl.exp2(logits - new[:, None]), 1)
        highest = new
    places = first + tl.arange(0, OWN)
    log_sums += head * tokens + begin
    tl.store(log_sums + places, highest + tl.log2(total), mask=places < length)


@triton.jit(do_not_specialize=["tokens"])
def column_means(
    query: tl.tensor,  # as above
    key: tl.tensor,
    log_sums: tl.tensor,  # [heads, T] float32 of `row_log_sums`
    received: tl.tensor,  # [heads, T] float32, written: mean over the segment's queries
    blocks: tl.tensor,
    tokens: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    scale: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
) -> None:
    begin, length, first = _block(blocks)
    head = tl.program_id(1)
    query += begin * query_stride + head * query_head_stride
    key += begin * key_stride + head * key_head_stride
    log_sums += head * tokens + begin
    own = _rows(key, key_stride, first, length, OWN, HEAD_SIZE, CHANNELS)
    weights = tl.zeros([OWN, OTHER], tl.float32)  # summed after the loop, as threads share a row
    for start in range(0, length, OTHER):
        other = _rows(query, query_stride, start, length, OTHER, HEAD_SIZE, CHANNELS)
        logits = tl.dot(own, tl.trans(other), input_precision="ieee") * scale
        rows = start + tl.arange(0, OTHER)
        # Rows after the end of the segment get infinity, and so no weight.
        log_sum = tl.load(log_sums + rows, mask=rows < length, other=float("inf"))
        weights += tl.exp2(logits - log_sum[None, :])
    places = first + tl.arange(0, OWN)
    received += head * tokens + begin
    tl.store(received + places, tl.sum(weights, 1) / length, mask=places < length)


@triton.jit
def _block(blocks: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return this program's row of `blocks`; the start is int64, as offsets may exceed 2^31."""
    blocks += 3 * tl.program_id(0)
    return tl.load(blocks).to(tl.int64), tl.load(blocks + 1), tl.load(blocks + 2)


@triton.jit
def _rows(
    tensor: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    length: tl.tensor,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """Load rows [ROWS, CHANNELS] from `first` on; zeros beyond the segment and the head size."""
    rows = first + tl.arange(0, ROWS)
    channels = tl.arange(0, CHANNELS)
    exists = (rows < length)[:, None] & (channels < HEAD_SIZE)[None, :]
    return tl.load(tensor + rows[:, None] * stride + channels[None, :], mask=exists, other=0.0)

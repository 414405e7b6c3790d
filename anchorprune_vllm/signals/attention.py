# SPDX-License-Identifier: Apache-2.0
"""Importance from the vision tower's own attention, without the N x N matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anchorprune_vllm.selection.kernels import runs_triton

# The part of the attention matrix computed at a time: as much as fits in a cache, but enough rows
# to be worth reading all keys. This is 1 KiB per token, less than a tower's own activations.
_BLOCK_NUMBERS = 2**20
_FEWEST_ROWS = 128


def cls_attention(query: Tensor, key: Tensor, num_heads: int, scale: float) -> Tensor:
    """Return the attention of the first token ([CLS]) to every token, summed over heads.

    Query and key are [B, T, num_heads * head_size]; the result is float32 [B, T].
    """
    # Only one row per head is computed, [B, T, H] instead of [B, H, T, T]. The query of each head
    # has zeros in the channels of other heads, so that keys need not be copied head by head.
    cls_query = query[:, 0].unflatten(1, (num_heads, -1))
    by_head = torch.diag_embed(cls_query.mT, dim1=1, dim2=3).flatten(1, 2)  # [B, H * head_size, H]
    logits = torch.bmm(key.float(), by_head.float()) * scale
    return logits.softmax(dim=1).sum(dim=2)


def class_attention(query: Tensor, key: Tensor, segments: Sequence[int], scale: float) -> Tensor:
    """Return the `cls_attention` of consecutive segments of equal length.

    Query and key are [T, heads, head_size], the lengths of segments add up to T, and the result is
    float32 [T].
    """
    by_segment = (len(segments), segments[0], -1)
    return cls_attention(
        query.reshape(by_segment), key.reshape(by_segment), query.shape[1], scale
    ).flatten()


def received_attention(query: Tensor, key: Tensor, segments: Sequence[int], scale: float) -> Tensor:
    """Return the attention each token receives from an average token, summed over heads.

    Tokens attend within consecutive segments. Memory grows linearly with the number of tokens.

    Query and key are [T, heads, head_size], the lengths of segments add up to T, and the result is
    float32 [T].
    """
    if sum(segments) != len(query) or min(segments, default=0) < 1:
        raise ValueError(
            f"segments {list(segments)} do not make up {len(query)} tokens: give their lengths, "
            f"at least 1 each, in order"
        )
    if not runs_triton(query.device):
        return received_in_blocks(query, key, segments, scale)
    from anchorprune_vllm.signals.kernels import gpu

    with torch.cuda.device_of(query):
        return gpu.received_attention(query, key, segments, scale)


@torch.no_grad()  # results are written to memory that is reused
def received_in_blocks(query: Tensor, key: Tensor, segments: Sequence[int], scale: float) -> Tensor:
    """Compute `received_attention` in torch, some rows of the attention matrix at a time."""
    most = max(_BLOCK_NUMBERS, _FEWEST_ROWS * max(segments))
    memory = query.new_empty(2, most, dtype=torch.float32)
    received = []
    for q, k in zip(query.split(list(segments)), key.split(list(segments)), strict=True):
        tokens = len(q)
        rows = min(tokens, max(_FEWEST_ROWS, _BLOCK_NUMBERS // tokens))
        heads = max(1, _BLOCK_NUMBERS // (rows * tokens))
        total = memory.new_zeros(tokens)
        for queries, keys in zip(q.split(heads, 1), k.split(heads, 1), strict=True):
            keys = keys.permute(1, 2, 0).float()  # [H, D, T]
            for block in queries.split(rows):
                block = block.transpose(0, 1).float() * scale  # [H, R, D]
                shape = (*block.shape[:2], tokens)
                logits, weights = (half[: math.prod(shape)].view(shape) for half in memory)
                torch.bmm(block, keys, out=logits)
                total += torch.softmax(logits, 2, out=weights).sum((0, 1))
        received.append(total / tokens)
    return torch.cat(received)

# SPDX-License-Identifier: Apache-2.0
"""Importance from the vision tower's own attention, without the N x N matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anchorprune_vllm.selection.kernels import runs_triton

# Of the attention matrix at a time: as much as stays in a cache, but enough rows to be worth the
# reading of all keys for them. 1 KiB per token, less than a tower's own activations.
_BLOCK_NUMBERS = 2**20
_FEWEST_ROWS = 128


def cls_attention(query: Tensor, key: Tensor, num_heads: int, scale: float) -> Tensor:
    """Attention of the first token ([CLS]) to every token, summed over heads.

    query, key: [B, T, num_heads * head_size]; returns float32 [B, T].
    """
    # One row per head, [B, T, H] instead of [B, H, T, T]. A head's query, with zeros for the
    # channels of the others, is multiplied with keys as they lie there; by head, they are copied.
    cls_query = query[:, 0].unflatten(1, (num_heads, -1))
    by_head = torch.diag_embed(cls_query.mT, dim1=1, dim2=3).flatten(1, 2)  # [B, H * head_size, H]
    logits = torch.bmm(key.float(), by_head.float()) * scale
    return logits.softmax(dim=1).sum(dim=2)


def class_attention(query: Tensor, key: Tensor, segments: Sequence[int], scale: float) -> Tensor:
    """`cls_attention` of segments of one length that lie one behind the other.

    query, key: [T, heads, head_size]; segments: their lengths, T in all; returns float32 [T].
    """
    by_segment = (len(segments), segments[0], -1)
    return cls_attention(
        query.reshape(by_segment), key.reshape(by_segment), query.shape[1], scale
    ).flatten()


def received_attention(query: Tensor, key: Tensor, segments: Sequence[int], scale: float) -> Tensor:
    """How much attention each token gets from an average token of its segment, summed over heads.

    Tokens attend within segments, which lie one behind the other. Memory grows with the number of
    tokens.

    query, key: [T, heads, head_size]; segments: their lengths, T in all; returns float32 [T].
    """
    if sum(segments) != len(query) or min(segments, default=0) < 1:
        raise ValueError(
            f"segments {list(segments)} do not make up {len(query)} tokens: give their lengths, "
            f"at least 1 each, one behind the other"
        )
    if not runs_triton(query.device):
        return received_in_blocks(query, key, segments, scale)
    from anchorprune_vllm.signals.kernels import gpu

    with torch.cuda.device_of(query):
        return gpu.received_attention(query, key, segments, scale)


@torch.no_grad()  # results go into memory that is used again
def received_in_blocks(query: Tensor, key: Tensor, segments: Sequence[int], scale: float) -> Tensor:
    """`received_attention` in torch: some rows of the attention matrix at a time, added up."""
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

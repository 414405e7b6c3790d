# SPDX-License-Identifier: Apache-2.0
"""Importance from the vision tower's own attention, without the N x N matrix.

Queries and keys are taken by a forward pre-hook on the attention module: nothing is recomputed, and
no forward method is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Measure = Callable[[Tensor, Tensor, Any], Tensor]

# Of the attention matrix at a time, per token and head: less than a tower's own activations.
_BLOCK_ROWS = 64


def cls_attention(query: Tensor, key: Tensor, num_heads: int, scale: float) -> Tensor:
    """Attention of the first token ([CLS]) to every token, summed over heads.

    query, key: [B, T, num_heads * head_size]; returns float32 [B, T].
    """
    batch, tokens, _ = key.shape
    cls_query = query[:, 0].view(batch, num_heads, -1)
    keys = key.view(batch, tokens, num_heads, -1)
    # One row per head: [B, H, T] instead of [B, H, T, T].
    logits = torch.einsum("bhd,bthd->bht", cls_query.float(), keys.float()) * scale
    return logits.softmax(dim=-1).sum(dim=1)


def received_attention(query: Tensor, key: Tensor, segments: Sequence[int], scale: float) -> Tensor:
    """How much attention each token gets from an average token of its segment, summed over heads.

    Tokens attend within segments, which lie one behind the other. Memory grows with the number of
    tokens: rows of the attention matrix are made in blocks and added up.

    query, key: [T, heads, head_size]; segments: their lengths, T in all; returns float32 [T].
    """
    received = []
    for q, k in zip(query.split(list(segments)), key.split(list(segments)), strict=True):
        keys = k.permute(1, 2, 0).float()  # [H, D, T]
        tokens = keys.shape[2]
        total = keys.new_zeros(tokens)
        for rows in q.split(max(1, _BLOCK_ROWS * len(key) // tokens)):
            weights = torch.bmm(rows.transpose(0, 1).float() * scale, keys)  # [H, R, T]
            weights.sub_(weights.amax(2, keepdim=True)).exp_()
            # Dividing the rows by their sums and adding them up is one more product.
            total += torch.bmm(weights.sum(2).reciprocal()[:, None], weights).sum((0, 1))
        received.append(total / tokens)
    return torch.cat(received)


@contextmanager
def tap_attention(attention: nn.Module, measure: Measure) -> Iterator[list[Tensor]]:
    """While entered, the list given gets what `measure` makes of each call of an attention module.

    `measure` is given query and key, as the module is, and the module itself.
    """
    taken: list[Tensor] = []

    def take(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        query, key = args[:2] if args else (kwargs["query"], kwargs["key"])
        taken.append(measure(query, key, module))

    handle = attention.register_forward_pre_hook(take, with_kwargs=True)
    try:
        yield taken
    finally:
        handle.remove()

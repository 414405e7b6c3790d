# SPDX-License-Identifier: Apache-2.0
"""Importance from the vision tower's own attention, without the N x N matrix.

Queries and keys are taken by a forward pre-hook on the attention module: nothing is recomputed, and
no forward method is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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


@contextmanager
def tap_cls_attention(attention: nn.Module) -> Iterator[list[Tensor]]:
    """While entered, the list given gets the `cls_attention` of each call of an attention module.

    The module is called with query and key as its first two arguments, [B, T, heads * head_size],
    and has `num_heads` (those of this rank) and `scale`.
    """
    taken: list[Tensor] = []

    def take(module: Any, args: tuple[Tensor, ...]) -> None:
        taken.append(cls_attention(args[0], args[1], module.num_heads, module.scale))

    handle = attention.register_forward_pre_hook(take)
    try:
        yield taken
    finally:
        handle.remove()

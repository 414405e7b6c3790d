# SPDX-License-Identifier: Apache-2.0
"""Importance from the vision tower's own attention, without the N x N matrix.

Queries and keys are taken by a forward pre-hook on the attention module: nothing is recomputed, and
no forward method is copied.
"""

from __future__ import annotations

from types import TracebackType

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


class ClsAttentionTap:
    """While entered, computes `cls_attention` of each call of an attention module.

    The module is called with query and key as its first two arguments, [B, T, heads * head_size],
    and has `num_heads` (those of this rank) and `scale`.
    """

    def __init__(self, attention: nn.Module) -> None:
        self._attention = attention
        self._taken: list[Tensor] = []

    def __enter__(self) -> ClsAttentionTap:
        self._handle = self._attention.register_forward_pre_hook(self._hook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.remove()

    def _hook(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        query, key = args[:2]
        self._taken.append(cls_attention(query, key, module.num_heads, module.scale))  # type: ignore[arg-type]

    def result(self) -> Tensor:
        """[B, T] of all calls, in order."""
        return torch.cat(self._taken)

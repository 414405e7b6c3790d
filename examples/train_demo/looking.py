# SPDX-License-Identifier: Apache-2.0
"""Attention that is told where to look, for as long as a model learns.

Attention over hundreds of tokens finds the few that matter by chance, and small models wait long
for it. Here two heads of a layer are also held to the place that a person would look at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

HEADS = 2


class Looking:
    """Queries and keys of the first heads of an attention, at its last call."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._given: dict[str, Any] = {}
        attention.register_forward_pre_hook(self._catch, with_kwargs=True)

    def _catch(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self._given = {"hidden_states": args[0], **given} if args else given

    def loss(self, rows: tuple[Tensor, Tensor], wanted: Tensor, seen: Tensor | None) -> Tensor:
        """Return minus the logarithm of the attention that falls on the wanted tokens.

        Args:
            rows: which batch [M] and which token [M] looks.
            wanted: bool [M, L], where each of them is to look.
            seen: bool [M, L], what each of them can see; None: all.
        """
        hidden = self._given["hidden_states"]
        size: int = self._attention.head_dim
        heads = (-1, size)
        query = self._attention.q_proj(hidden).unflatten(-1, heads).transpose(1, 2)[:, :HEADS]
        key = self._attention.k_proj(hidden).unflatten(-1, heads).transpose(1, 2)[:, :HEADS]
        if "position_embeddings" in self._given:
            query, key = apply_rotary_pos_emb(query, key, *self._given["position_embeddings"])
        batch, token = rows
        logits = (query @ key.mT * size**-0.5)[batch, :, token]  # [M, heads, L]
        if seen is not None:
            logits = logits.masked_fill(~seen[:, None], -torch.inf)
        on_wanted = logits.masked_fill(~wanted[:, None], -torch.inf).logsumexp(-1)
        return (logits.logsumexp(-1) - on_wanted).mean()

# SPDX-License-Identifier: Apache-2.0
"""A module like vLLM's attention, for hooks on towers that are transformers' own.

In transformers, query and key are local values of a forward method. But transformers looks up the
function that computes attention by name, and further names can be registered.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "anchorprune"


class TransformersAttention(nn.Module):
    """Receives query and key like vLLM's `MMEncoderAttention`, and lets transformers compute."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        config = attention.config
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_size: int = attention.head_dim
        self.scale: float = attention.scaling
        self._compute = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]

    @classmethod
    def inside(cls, attention: Any) -> TransformersAttention | None:
        """Return the module inside an attention of transformers, adding it if there is none.

        Returns None if this attention does not look up its function by name.
        """
        found: TransformersAttention | None = getattr(attention, _NAME, None)
        if found is None and attention.config._attn_implementation in ALL_ATTENTION_FUNCTIONS:
            found = cls(attention)
            attention.add_module(_NAME, found)
            # All layers share the config, and the mask is made by the name in it: change a copy.
            attention.config = copy(attention.config)
            attention.config._attn_implementation_internal = _NAME
            ALL_ATTENTION_FUNCTIONS.register(_NAME, _through_module)
        return found

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, owner: nn.Module, **others: Any
    ) -> Tensor:
        """Return the output of an attention; all tensors are [B, T, heads, head size]."""
        by_head = (each.transpose(1, 2) for each in (query, key, value))
        output, _ = self._compute(owner, *by_head, **others)
        return output


def _through_module(
    attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **others: Any
) -> tuple[Tensor, None]:
    by_token = (each.transpose(1, 2) for each in (query, key, value))
    inside: Any = getattr(attention, _NAME)
    return inside(*by_token, owner=attention, attention_mask=mask, **others), None

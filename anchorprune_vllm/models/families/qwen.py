# SPDX-License-Identifier: Apache-2.0
"""Qwen's vision towers, from Qwen2-VL to Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from anchorprune_vllm.models.families.plain import Consecutive, Windowed


class Qwen(Consecutive):
    """Qwen models whose towers have full attention in all blocks."""

    can_be_data_parallel = True

    def tower_attention(self) -> nn.Module | None:
        return self._attention_of(max(self._whole_blocks()))

    def object_attention(self) -> nn.Module | None:
        model: Any = self
        middle = len(model.visual.blocks) // 2
        # Of two that are equally near, the shallower one is taken.
        nearest = min(sorted(self._whole_blocks()), key=lambda block: abs(block - middle))
        return self._attention_of(nearest)

    def _attention_of(self, block: int) -> nn.Module:
        model: Any = self
        return model.visual.blocks[block].attn.attn

    def _whole_blocks(self) -> Sequence[int]:
        """Return the blocks in which all patches of a frame attend to each other."""
        model: Any = self
        return range(len(model.visual.blocks))


class Qwen2(Qwen):
    """Qwen2-VL, whose prompts have no text between the frames of a video."""

    takes_embeddings = True


class Qwen2_5(Windowed, Qwen2):
    """Qwen2.5-VL, whose tower attends within windows in most blocks, and orders tokens by them."""

    def _whole_blocks(self) -> Sequence[int]:
        model: Any = self
        return model.visual.fullatt_block_indexes

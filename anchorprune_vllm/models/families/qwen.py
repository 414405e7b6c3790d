# SPDX-License-Identifier: Apache-2.0
"""Qwen's vision towers, from Qwen2-VL to Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from anchorprune_vllm.models.families.plain import Consecutive, Windowed


class Qwen(Consecutive):
    """Merged patches; all blocks of the tower have full attention."""

    can_be_data_parallel = True

    def tower_attention(self) -> nn.Module | None:
        return self._attention_of(max(self._whole_blocks()))

    def object_attention(self) -> nn.Module | None:
        model: Any = self
        middle = len(model.visual.blocks) // 2
        # The shallower of two that are as near.
        nearest = min(sorted(self._whole_blocks()), key=lambda block: abs(block - middle))
        return self._attention_of(nearest)

    def _attention_of(self, block: int) -> nn.Module:
        model: Any = self
        return model.visual.blocks[block].attn.attn

    def _whole_blocks(self) -> Sequence[int]:
        """Return the blocks in which all patches of a frame see each other."""
        model: Any = self
        return range(len(model.visual.blocks))


class Qwen2(Qwen):
    """Qwen2-VL, in whose prompts no text stands between the frames of a video."""

    takes_embeddings = True


class Qwen2_5(Windowed, Qwen2):
    """Qwen2.5-VL: most blocks of the tower see windows, in whose order its tokens lie."""

    def _whole_blocks(self) -> Sequence[int]:
        model: Any = self
        return model.visual.fullatt_block_indexes

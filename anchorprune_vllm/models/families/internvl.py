# SPDX-License-Identifier: Apache-2.0
"""InternVL, whose units are tiles and a thumbnail; importance is the class token's attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from vllm.multimodal.inputs import MultiModalKwargsItem

from anchorprune_vllm.models.families.base import Family
from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.signals.attention import class_attention


class InternVL(Family):
    """InternVL in its own format and in the format of transformers."""

    video_margin = 0

    @classmethod
    def units(
        cls, hf_config: Any, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        vision = hf_config.vision_config
        size = getattr(hf_config, "force_image_size", None) or vision.image_size
        height, patch = (
            sides[0] if isinstance(sides, Sequence) else sides
            for sides in (size, vision.patch_size)
        )
        side = int(height // patch * hf_config.downsample_ratio)
        tiles = layout.embeddings // side**2
        return MediaTokens(layout.embeddings, (side**2,) * tiles, (side,) * tiles)

    def tower_order(self, ratio: int) -> TowerOrder | None:
        if getattr(self, "ps_version", "v2") == "v1":  # this version swaps rows and columns
            return None
        return TowerOrder("unit", "first", "raster", ratio)

    def importance(
        self, query: Tensor, key: Tensor, segments: Sequence[int], scale: float
    ) -> Tensor:
        return class_attention(query, key, segments, scale)

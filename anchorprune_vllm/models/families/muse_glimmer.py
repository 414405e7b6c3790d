# SPDX-License-Identifier: Apache-2.0
"""Muse Glimmer, whose tower processes an image in squares as large as its position table."""

from __future__ import annotations

from typing import Any

from vllm.multimodal.inputs import MultiModalKwargsItem

from anchorprune_vllm.models.families.base import Family
from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout


class MuseGlimmer(Family):
    """Muse Glimmer: squares of the tower's grid become rows; pixels or grid give a unit's width."""

    @classmethod
    def units(
        cls, hf_config: Any, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        if f"{modality}_pixel_values" not in item:  # from vLLM 0.33 on, the item has a grid instead
            return super().units(hf_config, modality, item, layout)
        pixels: Any = item[f"{modality}_pixel_values"].data
        vision = hf_config.vision_config
        width = pixels.shape[-1] // (vision.patch_size * _merge_size(vision))
        sizes = layout.unit_sizes
        return MediaTokens(layout.embeddings, sizes, (width,) * len(sizes))

    def tower_order(self, ratio: int) -> TowerOrder:
        model: Any = self
        vision = model.config.vision_config
        has_windows = any(kind != "full_attention" for kind in vision.layer_types)
        window = vision.pos_emb_height // _merge_size(vision) if has_windows else 0
        return TowerOrder("unit", "none", "raster", ratio, window)


def _merge_size(vision: Any) -> int:
    """Return the side of the squares of patches that become a row; vLLM 0.33 renamed its field."""
    return vision.merge_kernel_size if hasattr(vision, "merge_kernel_size") else vision.merge_size

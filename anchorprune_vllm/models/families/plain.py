# SPDX-License-Identifier: Apache-2.0
"""Families that state little more than the order in which their tower's tokens become rows."""

from __future__ import annotations

from math import isqrt
from typing import Any

from vllm.multimodal.inputs import MultiModalKwargsItem

from anchorprune_vllm.models.families.base import Family
from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout


class Consecutive(Family):
    """Models in which consecutive tokens of the tower become a row (Qwen and GLM)."""

    video_margin: int | None = 0  # without effect on videos that have no text between frames

    def tower_order(self, ratio: int) -> TowerOrder:
        return TowerOrder("unit", "none", "consecutive", ratio)


class Windowed(Consecutive):
    """Models like `Consecutive` whose tower also processes rows window by window (Qwen2.5)."""

    def tower_order(self, ratio: int) -> TowerOrder:
        model: Any = self
        vision = model.config.vision_config
        window = vision.window_size // vision.patch_size // isqrt(ratio)
        return TowerOrder("unit", "none", "consecutive", ratio, window)


class Glm(Consecutive):
    """Models like `Consecutive` with one token before and one after the frames of a video."""

    video_margin = 1


class Raster(Family):
    """Models in which squares of the tower's grid become a row (Gemma 3, Mistral, Idefics)."""

    def tower_order(self, ratio: int) -> TowerOrder:
        return TowerOrder("unit", "none", "raster", ratio)


class UnbrokenRaster(Raster):
    """Models like `Raster` whose prompts have no row separators (LightOnOCR).

    The size of the pixels gives the length of a row.
    """

    @classmethod
    def units(
        cls, hf_config: Any, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        pixels: Any = item["pixel_values"].data
        side = hf_config.vision_config.patch_size * hf_config.spatial_merge_size
        size = layout.embeddings
        return MediaTokens(size, (size,), (pixels.shape[-1] // side,))


class Lfm2(Raster):
    """Models like `Raster` with tiles of any shape, which the processor reports (LFM2-VL)."""

    @classmethod
    def units(
        cls, hf_config: Any, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        shapes: Any = item["spatial_shapes"].data  # counted in patches
        rows, columns = (shapes // hf_config.downsample_factor).T.tolist()
        sizes = tuple(row * column for row, column in zip(rows, columns, strict=True))
        return MediaTokens(layout.embeddings, sizes, tuple(columns))


class ExpandedRaster(Raster):
    """Models like `Raster` whose prompts arrive with all image tokens (Mistral's own format)."""

    @classmethod
    def target(cls, info: Any, modality: str, replaced: list[int]) -> list[int]:
        return [info.get_hf_processor().image_end_id]


class RasterBeforeClassToken(Family):
    """Models in which squares become a row, and the last token is a class token (Llama 4)."""

    def tower_order(self, ratio: int) -> TowerOrder:
        return TowerOrder("unit", "last", "raster", ratio)

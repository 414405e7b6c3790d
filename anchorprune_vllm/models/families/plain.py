# SPDX-License-Identifier: Apache-2.0
"""Families that need few words: they state the order of their towers, and one where rows end."""

from __future__ import annotations

from math import isqrt
from typing import Any

from vllm.multimodal.inputs import MultiModalKwargsItem

from anchorprune_vllm.models.families.base import Family
from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout


class Consecutive(Family):
    """The tower's tokens that become a row lie one behind the other (Qwen's and GLM's)."""

    video_margin: int | None = 0  # of videos without text between frames it tells nothing

    def tower_order(self, ratio: int) -> TowerOrder:
        return TowerOrder("unit", "none", "consecutive", ratio)


class Windowed(Consecutive):
    """As above; and rows lie in the tower window by window (Qwen2.5's)."""

    def tower_order(self, ratio: int) -> TowerOrder:
        model: Any = self
        vision = model.config.vision_config
        window = vision.window_size // vision.patch_size // isqrt(ratio)
        return TowerOrder("unit", "none", "consecutive", ratio, window)


class Glm(Consecutive):
    """Consecutive; and a token before the frames of a video, and one behind, are of no frame."""

    video_margin = 1


class Raster(Family):
    """Squares of the tower's own grid become a row (Gemma 3, Mistral, Idefics)."""

    def tower_order(self, ratio: int) -> TowerOrder:
        return TowerOrder("unit", "none", "raster", ratio)


class UnbrokenRaster(Raster):
    """The same, where nothing ends a row of the prompt, and the pixels say how long it is.

    LightOnOCR's.
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
    """The same for tiles of any shape, which the processor tells (LFM2-VL)."""

    @classmethod
    def units(
        cls, hf_config: Any, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        shapes: Any = item["spatial_shapes"].data  # of patches
        rows, columns = (shapes // hf_config.downsample_factor).T.tolist()
        sizes = tuple(row * column for row, column in zip(rows, columns, strict=True))
        return MediaTokens(layout.embeddings, sizes, tuple(columns))


class ExpandedRaster(Raster):
    """The same in Mistral's own format, where a prompt arrives with all tokens of its images."""

    @classmethod
    def target(cls, info: Any, modality: str, replaced: list[int]) -> list[int]:
        return [info.get_hf_processor().image_end_id]


class RasterBeforeClassToken(Family):
    """Squares of the tower's own grid become a row, and its last token is of no row (Llama 4)."""

    def tower_order(self, ratio: int) -> TowerOrder:
        return TowerOrder("unit", "last", "raster", ratio)

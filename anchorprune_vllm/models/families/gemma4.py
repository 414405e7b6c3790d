# SPDX-License-Identifier: Apache-2.0
"""Gemma 4, whose tower is transformers' own and receives its patches followed by padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.multimodal.inputs import MultiModalKwargsItem

from anchorprune_vllm.models.families.base import Family
from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.models.general.transformers_attention import TransformersAttention
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout

_FIELDS = {"image": ("pixel_values", "pixel_position_ids")}
_FIELDS["video"] = ("pixel_values_videos", "pixel_position_ids_videos")


class Gemma4(Family):
    """Gemma 4: squares of the tower's grid become rows; the grid has the image's proportions."""

    @classmethod
    def units(
        cls, hf_config: Any, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        given: Any = item
        places = given[_FIELDS[modality][1]].data  # columns and rows of patches; -1 is padding
        side = hf_config.vision_config.pooling_kernel_size
        columns, rows = (places.reshape(-1, *places.shape[-2:]).amax(1) // side + 1).T.tolist()
        sizes = tuple(width * height for width, height in zip(columns, rows, strict=True))
        return MediaTokens(layout.embeddings, sizes, tuple(columns))

    def tower_attention(self) -> nn.Module | None:
        model: Any = self
        return TransformersAttention.inside(model.vision_tower.encoder.layers[-1].self_attn)

    def tower_order(self, ratio: int) -> TowerOrder:
        model: Any = self
        side = model.config.vision_config.pooling_kernel_size
        return TowerOrder("unit", "none", "raster", side**2)

    def embed_unpruned(self, **kwargs: Any) -> Sequence[Tensor]:
        (pixels,) = (kwargs[name] for name, _ in _FIELDS.values() if name in kwargs)
        self._padded = [len(patches) for patches in pixels]
        return super().embed_unpruned(**kwargs)  # type: ignore[misc]

    def unpadded(self, segments: Sequence[int]) -> Tensor:
        # The tower receives all items of one padded length before those of another.
        start, starts = 0, dict[int, int]()
        for length in dict.fromkeys(self._padded):
            for number, padded in enumerate(self._padded):
                if padded == length:
                    starts[number] = start
                    start += length
        parts = [
            torch.arange(starts[number], starts[number] + patches, device="cpu")
            for number, patches in enumerate(segments)
        ]
        return torch.cat(parts)

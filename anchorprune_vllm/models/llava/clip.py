# SPDX-License-Identifier: Apache-2.0
"""The parts that models with a CLIP vision tower share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from anchorprune_vllm.models.llava.contrastive import (
    ContrastivePrunedModel,
    ContrastivePruningProcessor,
    encode_tiles,
)
from anchorprune_vllm.signals.attention import class_attention
from anchorprune_vllm.signals.clip import CLIP
from anchorprune_vllm.signals.features import MediaFeatures


def encode_clip_tiles(model: Any, pixel_values: Tensor) -> MediaFeatures:
    """Return the features [B, N, ...] of tiles [B, 3, H, W]."""
    encoded = encode_tiles(model, pixel_values, class_attention)
    return replace(encoded, aligned=model._align(encoded.rows))


class ClipPruningProcessor(ContrastivePruningProcessor):
    """A mixin that tokenizes questions for CLIP's text tower."""

    contrastive_family = CLIP


class ClipPrunedModel(ContrastivePrunedModel):
    """A mixin for models with a CLIP tower; list it before the vLLM model that it extends."""

    contrastive_family = CLIP

    def _cache_page(self) -> int:
        return self.vision_tower.vision_model.embeddings.num_positions  # type: ignore[attr-defined]

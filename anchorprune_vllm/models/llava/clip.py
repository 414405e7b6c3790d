# SPDX-License-Identifier: Apache-2.0
"""What models with a CLIP vision tower share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anchorprune_vllm.config import Similarity
from anchorprune_vllm.models.llava.contrastive import (
    PairedPrunedModel,
    PairedPruningProcessor,
    encode_tiles,
)
from anchorprune_vllm.signals.attention import cls_attention
from anchorprune_vllm.signals.clip import CLIP, ClipSignals
from anchorprune_vllm.signals.contrastive import TextPair
from anchorprune_vllm.worker.feature_cache import MediaFeatures


def encode_clip_tiles(model: Any, pixel_values: Tensor) -> MediaFeatures:
    """Features [B, N, ...] of tiles [B, 3, H, W]."""
    return encode_tiles(model, pixel_values, _cls_attention)


def _cls_attention(query: Tensor, key: Tensor, attention: Any) -> Tensor:
    # The heads are those of this rank.
    return cls_attention(query, key, attention.num_heads, attention.scale)


class ClipPruningProcessor(PairedPruningProcessor):
    """Mixin: prompts with K placeholders per image, queries written for CLIP's text tower."""

    pair_family = CLIP


class ClipPrunedModel(PairedPrunedModel):
    """Mixin: list it before the vLLM model that it extends."""

    pair_family = CLIP

    def _signals_of(self, pair: TextPair, similarity: Similarity) -> ClipSignals:
        return ClipSignals(pair, similarity)

    def _cache_page(self) -> int:
        return self.vision_tower.vision_model.embeddings.num_positions  # type: ignore[attr-defined]

    def _hidden_size(self) -> int:
        return self.config.vision_config.hidden_size  # type: ignore[attr-defined]

# SPDX-License-Identifier: Apache-2.0
"""What models with a CLIP vision tower share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from anchorprune_vllm.models.paired_tower import (
    PairedPrunedModel,
    PairedPruningProcessor,
    encode_tiles,
)
from anchorprune_vllm.signals.attention import cls_attention
from anchorprune_vllm.signals.clip import CLIP, ClipSignals
from anchorprune_vllm.signals.text_pair import TextPair


def encode_clip_tiles(model: Any, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden [B, N, D] and importance float32 [B, N] of tiles [B, 3, H, W]."""
    return encode_tiles(model, pixel_values, _cls_attention)


def _cls_attention(query: Tensor, key: Tensor, attention: Any) -> Tensor:
    # The heads are those of this rank.
    return cls_attention(query, key, attention.num_heads, attention.scale)


class ClipPruningProcessor(PairedPruningProcessor):
    """Mixin: prompts with K placeholders per image, queries written for CLIP's text tower."""

    pair_family = CLIP

    def _media_token_ids(self) -> Mapping[str, int]:
        return {"image": self.info.get_hf_config().image_token_index}


class ClipPrunedModel(PairedPrunedModel):
    """Mixin: list it before the vLLM model that it extends."""

    pair_family = CLIP

    def _media_token_ids(self) -> list[int]:
        return [self.config.image_token_index]  # type: ignore[attr-defined]

    def _signals_of(self, pair: TextPair) -> ClipSignals:
        return ClipSignals(pair)

    def _feature_shape(self) -> tuple[int, int]:
        embeddings = self.vision_tower.vision_model.embeddings  # type: ignore[attr-defined]
        return embeddings.num_positions, embeddings.embed_dim

# SPDX-License-Identifier: Apache-2.0
"""What models with a SigLIP vision tower share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anchorprune_vllm.config import Similarity
from anchorprune_vllm.models.llava.contrastive import (
    PairedPrunedModel,
    PairedPruningProcessor,
    encode_tiles,
    tile_attention,
)
from anchorprune_vllm.signals.contrastive import TextPair
from anchorprune_vllm.signals.siglip import SIGLIP, SiglipSignals
from anchorprune_vllm.worker.feature_cache import MediaFeatures


class SiglipPruningProcessor(PairedPruningProcessor):
    """Mixin: prompts with K placeholders per item, queries written for SigLIP's text tower."""

    pair_family = SIGLIP


class SiglipPrunedModel(PairedPrunedModel):
    """Mixin: list it before the vLLM model that it extends."""

    pair_family = SIGLIP
    modalities = ("image", "video")
    config: Any
    multi_modal_projector: Any

    def encode_items(
        self, pixel_values: Tensor, lay_out: Callable[[Tensor], Sequence[Tensor]]
    ) -> list[MediaFeatures]:
        """Features of the items that tiles [B, 3, H, W] belong to.

        A row is a token as the language model gets it, as the tower gives it, and, if features are
        needed, in SigLIP space, side by side.

        lay_out: patches [B, P, C] to the tokens [N, C] of each item.
        """
        encoded = encode_tiles(self, pixel_values, tile_attention)
        hidden = encoded.hidden
        # Each part is laid out before the next is made: pooled, it is smaller.
        parts = [lay_out(self.multi_modal_projector(hidden)), lay_out(hidden)]
        if "features" in self.needs:
            parts.append(lay_out(self._pair.embed_patches(hidden)))
        rows = [torch.cat(item, dim=-1) for item in zip(*parts, strict=True)]

        def lay_out_part(part: Tensor) -> Sequence[Tensor]:
            if part is hidden:
                return rows
            # Of a token, [C] at a time.
            laid_out = lay_out(part.flatten(2) if part.ndim > 2 else part[..., None])
            return [tokens.reshape(-1, *part.shape[2:]) for tokens in laid_out]

        return encoded.regrouped(lay_out_part)

    def project(self, rows: Tensor) -> Tensor:
        """Rows [K, C] to language-model embeddings [K, H]."""
        return rows[:, : self._row_parts()[0]]

    def _row_parts(self) -> list[int]:
        vision_size = self.config.vision_config.hidden_size  # SigLIP's space is as large
        behind = [vision_size] * (2 if "features" in self.needs else 1)
        return [self.config.get_text_config().hidden_size, *behind]

    def _context_of(self, rows: Tensor) -> Tensor:
        return rows.split(self._row_parts(), dim=1)[1]

    def _signals_of(self, pair: TextPair, similarity: Similarity) -> SiglipSignals:
        self._pair = pair
        return SiglipSignals(pair, self._row_parts(), similarity)

    def _cache_page(self) -> int:
        vision = self.config.vision_config
        return (vision.image_size // vision.patch_size) ** 2

    def _hidden_size(self) -> int:
        return sum(self._row_parts())

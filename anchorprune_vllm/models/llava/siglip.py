# SPDX-License-Identifier: Apache-2.0
"""The parts that models with a SigLIP vision tower share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from anchorprune_vllm.models.llava.contrastive import (
    ContrastivePrunedModel,
    ContrastivePruningProcessor,
    encode_tiles,
)
from anchorprune_vllm.signals.attention import received_attention
from anchorprune_vllm.signals.features import MediaFeatures
from anchorprune_vllm.signals.siglip import SIGLIP


class SiglipPruningProcessor(ContrastivePruningProcessor):
    """A mixin that tokenizes questions for SigLIP's text tower."""

    contrastive_family = SIGLIP


class SiglipPrunedModel(ContrastivePrunedModel):
    """A mixin for models with a SigLIP tower; list it before the vLLM model that it extends."""

    contrastive_family = SIGLIP
    modalities = ("image", "video")
    config: Any
    multi_modal_projector: Any

    def encode_items(
        self, pixel_values: Tensor, lay_out: Callable[[Tensor], Sequence[Tensor]]
    ) -> list[MediaFeatures]:
        """Return the features of the items that tiles [B, 3, H, W] belong to.

        Each field is pooled separately, because pooling does not commute with the projection that
        makes the field from the tower's rows. `lay_out` is a function from patches [B, P, C] to the
        tokens [N, C] of each item.
        """
        encoded = encode_tiles(self, pixel_values, received_attention)
        hidden = encoded.rows
        # Each field is laid out before the next one is made, as it is smaller when pooled.
        parts = {"embeddings": lay_out(self.multi_modal_projector(hidden))}
        for name, part in encoded.parts().items():
            # `lay_out` expects one vector [C] per token.
            laid_out = lay_out(part.flatten(2) if part.ndim > 2 else part[..., None])
            parts[name] = [tokens.reshape(-1, *part.shape[2:]) for tokens in laid_out]
        aligned = self._align(hidden)
        if aligned is not None:
            parts["aligned"] = lay_out(aligned)
        return [
            MediaFeatures(**dict(zip(parts, item, strict=True)))
            for item in zip(*parts.values(), strict=True)
        ]

    def _row_widths(self) -> dict[str, int]:
        return {"embeddings": self.config.get_text_config().hidden_size, **super()._row_widths()}

    def _cache_page(self) -> int:
        vision = self.config.vision_config
        return (vision.image_size // vision.patch_size) ** 2

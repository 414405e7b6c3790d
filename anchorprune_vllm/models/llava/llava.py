# SPDX-License-Identifier: Apache-2.0
"""LLaVA-1.5, in which an image is one unit of 24 x 24 CLIP patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.llava import (
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.multimodal.inputs import MultiModalKwargsItem

from anchorprune_vllm.models.llava.clip import (
    ClipPrunedModel,
    ClipPruningProcessor,
    encode_clip_tiles,
)
from anchorprune_vllm.models.pruned_model import UnprunedLimits, prunes_with
from anchorprune_vllm.plan import ItemPlan, MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.signals.features import MediaFeatures
from anchorprune_vllm.worker.positions import MediaPositions


class PrunedLlavaInfo(UnprunedLimits, LlavaProcessingInfo):
    """vLLM's processing info of LLaVA-1.5, with the size of the largest unpruned image."""


class PrunedLlavaProcessor(ClipPruningProcessor, LlavaMultiModalProcessor):
    """A processor of LLaVA-1.5 prompts with K placeholders per image."""

    def _count_tokens(
        self, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        # Every image is resized to the tower's own size.
        tokens = self.info.get_max_image_tokens()
        side = self.info.get_vision_encoder_info().get_patch_grid_length()
        return MediaTokens(tokens, (tokens,), (side,))


class _Images:
    """The images of one call, as a `MediaBatch`."""

    def __init__(self, model: PrunedLlava, pixel_values: Tensor) -> None:
        self._model = model
        self._pixel_values = pixel_values
        self.project = model.multi_modal_projector

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        return encode_clip_tiles(self._model, self._pixels(items)).regrouped(Tensor.unbind)

    def embed_unpruned(self, items: list[int]) -> Sequence[Tensor]:
        return LlavaForConditionalGeneration.embed_multimodal(
            self._model, pixel_values=self._pixels(items)
        )

    def positions(self, item: int, plan: ItemPlan) -> MediaPositions | None:
        return self._model.linear_positions(plan, lambda: torch.arange(plan.tokens.unpruned))

    def _pixels(self, items: list[int]) -> Tensor:
        if len(items) == len(self._pixel_values):
            return self._pixel_values
        # Indexing with a list would copy the list to the device and wait for that.
        return torch.stack([self._pixel_values[i] for i in items])


@prunes_with(PrunedLlavaProcessor, PrunedLlavaInfo)
class PrunedLlava(ClipPrunedModel, LlavaForConditionalGeneration):
    """vLLM's LLaVA-1.5, pruned if the HF config has a budget."""

    def _media(self, modality: str, kwargs: dict[str, Any], plans: Sequence[ItemPlan]) -> _Images:
        return _Images(self, self._parse_and_validate_image_input(**kwargs)["pixel_values"])

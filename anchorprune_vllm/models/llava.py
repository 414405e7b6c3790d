# SPDX-License-Identifier: Apache-2.0
"""LLaVA-1.5: 24 x 24 CLIP patches per image, one unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.models.llava import (
    BaseLlavaProcessingInfo,
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
    _build_llava_or_pixtral_hf_info,
    _build_llava_or_pixtral_hf_processor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import BaseMultiModalProcessor, InputProcessingContext

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.feature_cache import MediaFeatures
from anchorprune_vllm.models.clip_tower import encode_images, make_pruner, text_encoder_of
from anchorprune_vllm.plan import pop_plans
from anchorprune_vllm.processor import PruningProcessor, refuse_overrides
from anchorprune_vllm.signals.clip import ClipQueryTokenizer


class PrunedLlavaInfo(LlavaProcessingInfo):
    """Counts as unpruned where vLLM plans the encoder: a request may ask for all tokens."""

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        return {"image": self.get_max_image_tokens()}


class PrunedLlavaProcessor(PruningProcessor, LlavaMultiModalProcessor):
    """LLaVA-1.5 prompts with K placeholders per image."""

    def _media_token_ids(self) -> Mapping[str, int]:
        return {"image": self.info.get_hf_config().image_token_index}

    def _text_encoder(self) -> str:
        return text_encoder_of(self.info.get_hf_config(), self.prune_config)

    def _make_query_tokenizer(self, text_encoder: str) -> ClipQueryTokenizer:
        return ClipQueryTokenizer(text_encoder)

    def _count_candidates(
        self, modality: str, mm_items: MultiModalDataItems, processed: BatchFeature
    ) -> list[int]:
        # Every image is resized to the tower's own size.
        return [self.info.get_max_image_tokens()] * mm_items.get_count(modality)


def _make_info(ctx: InputProcessingContext) -> BaseLlavaProcessingInfo:
    if PruneConfig.of_model(ctx.get_hf_config()) is None:
        return _build_llava_or_pixtral_hf_info(ctx)
    return PrunedLlavaInfo(ctx)


def _make_processor(
    info: BaseLlavaProcessingInfo, dummy_inputs: LlavaDummyInputsBuilder
) -> BaseMultiModalProcessor:
    if isinstance(info, PrunedLlavaInfo):
        return PrunedLlavaProcessor(info, dummy_inputs)
    return refuse_overrides(_build_llava_or_pixtral_hf_processor(info, dummy_inputs))


class _Images:
    """One call's images, as the pruner asks for them."""

    def __init__(self, model: LlavaForConditionalGeneration, pixel_values: Tensor) -> None:
        self._model = model
        self._pixel_values = pixel_values
        self.project = model.multi_modal_projector

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        return encode_images(self._model, self._pixels(items))

    def embed_whole(self, items: list[int]) -> Sequence[Tensor]:
        return LlavaForConditionalGeneration.embed_multimodal(
            self._model, pixel_values=self._pixels(items)
        )

    def _pixels(self, items: list[int]) -> Tensor:
        if len(items) == len(self._pixel_values):
            return self._pixel_values
        # Indexing with a list would copy it to the device and wait for that.
        return torch.stack([self._pixel_values[i] for i in items])


@MULTIMODAL_REGISTRY.register_processor(
    _make_processor, info=_make_info, dummy_inputs=LlavaDummyInputsBuilder
)
class PrunedLlava(LlavaForConditionalGeneration):
    """vLLM's LLaVA, pruned when the HF config carries a budget; otherwise exactly vLLM's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = PruneConfig.of_model(self.config)
        has_images = self.multimodal_config.get_limit_per_prompt("image") > 0
        self._pruner = None
        if config is not None and has_images and get_pp_group().is_first_rank:
            tokens = self.vision_tower.vision_model.embeddings.num_positions
            self._pruner = make_pruner(config, vllm_config, self, page_tokens=tokens)

    def embed_multimodal(self, **kwargs: Any) -> Sequence[Tensor]:
        plans = pop_plans("image", kwargs)
        if plans is None or self._pruner is None:
            return super().embed_multimodal(**kwargs)
        images = self._parse_and_validate_image_input(**kwargs)
        return self._pruner.embed(_Images(self, images["pixel_values"]), plans)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if self._pruner is not None:
            self._pruner.forget_media()
        return super().load_weights(weights)

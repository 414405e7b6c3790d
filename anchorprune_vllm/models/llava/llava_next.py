# SPDX-License-Identifier: Apache-2.0
"""LLaVA-NeXT, whose units are a base view and crops of 24 x 24 CLIP patches each.

Kept tokens come unit by unit, in raster order inside a unit, without the newline embeddings that
the model puts after the rows of an unpruned image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.llava_next import (
    LlavaNextForConditionalGeneration,
    LlavaNextImagePixelInputs,
    LlavaNextMultiModalProcessor,
    LlavaNextProcessingInfo,
)
from vllm.multimodal.inputs import MultiModalKwargsItem

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.models.llava.anyres import unpruned_index_of_patches
from anchorprune_vllm.models.llava.clip import (
    ClipPrunedModel,
    ClipPruningProcessor,
    encode_clip_tiles,
)
from anchorprune_vllm.models.pruned_model import UnprunedLimits, prunes_with
from anchorprune_vllm.plan import ItemPlan, MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.signals.features import MediaFeatures
from anchorprune_vllm.worker.positions import MediaPositions


def unpruned_index_of(hf_config: Any, image_size: Tensor) -> Tensor:
    """Return the indices [units, patches] of an image's patches among its unpruned tokens.

    Patches in the letterbox padding have index -1. Processor and model both count with this.

    `image_size` is a CPU tensor [2] with height and width.
    """
    height, width = image_size.tolist()
    vision = hf_config.vision_config
    return unpruned_index_of_patches(
        (height, width), hf_config.image_grid_pinpoints, vision.image_size, vision.patch_size
    )


class PrunedLlavaNextInfo(UnprunedLimits, LlavaNextProcessingInfo):
    """vLLM's processing info of LLaVA-NeXT, with the size of the largest unpruned image."""


class PrunedLlavaNextProcessor(ClipPruningProcessor, LlavaNextMultiModalProcessor):
    """A processor of LLaVA-NeXT prompts with K placeholders per image."""

    def _count_tokens(
        self, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        image_size: Any = item["image_sizes"].data  # the model counts with the same field
        height, width = image_size.tolist()
        candidates = unpruned_index_of(self.info.get_hf_config(), image_size) >= 0
        # Unpadding leaves a rectangle of each crop.
        side = self.info.get_vision_encoder_info().get_patch_grid_length()
        widths = candidates.view(-1, side, side).any(dim=1).sum(dim=1)
        return MediaTokens(
            unpruned=self.info.get_num_image_tokens(image_width=width, image_height=height),
            unit_sizes=tuple(candidates.sum(dim=1).tolist()),
            unit_widths=tuple(widths.tolist()),
        )


class _Images:
    """The images of one call, as a `MediaBatch`."""

    def __init__(self, model: PrunedLlavaNext, images: LlavaNextImagePixelInputs) -> None:
        self._model = model
        self._tiles = images["pixel_values"]
        self._sizes = images["image_sizes"]
        self.project = model.multi_modal_projector

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        candidates = [self._unpruned_index(i) >= 0 for i in items]
        encoded = encode_clip_tiles(self._model, torch.cat([self._tiles[i] for i in items]))
        # A single index serves all images. It has numbers, because a mask would first have to be
        # counted on the device.
        numbers = torch.cat(candidates).flatten().nonzero().squeeze(1)
        index = to_device(numbers, encoded.rows.device)
        sizes = [int(patches.sum()) for patches in candidates]
        return encoded.regrouped(lambda part: part.flatten(0, 1)[index].split(sizes))

    def embed_unpruned(self, items: list[int]) -> Sequence[Tensor]:
        return LlavaNextForConditionalGeneration.embed_multimodal(
            self._model,
            pixel_values=[self._tiles[i] for i in items],
            image_sizes=torch.stack([self._sizes[i] for i in items]),
        )

    def positions(self, item: int, plan: ItemPlan) -> MediaPositions | None:
        def unpruned_index() -> Tensor:
            of_patches = self._unpruned_index(item)
            return of_patches[of_patches >= 0]

        return self._model.linear_positions(plan, unpruned_index)

    def _unpruned_index(self, item: int) -> Tensor:
        return unpruned_index_of(self._model.config, self._sizes[item])


@prunes_with(PrunedLlavaNextProcessor, PrunedLlavaNextInfo)
class PrunedLlavaNext(ClipPrunedModel, LlavaNextForConditionalGeneration):
    """vLLM's LLaVA-NeXT, pruned if the HF config has a budget."""

    @classmethod
    def check(cls, model_config: Any, config: PruneConfig) -> None:
        strategy = model_config.hf_config.vision_feature_select_strategy
        if strategy != "default":
            raise ValueError(
                f"anchorprune: this LLaVA-NeXT has vision_feature_select_strategy {strategy!r}; "
                "only 'default' (patches without the class token) can be pruned; leave out "
                "--anchorprune-budget to serve it unpruned"
            )
        super().check(model_config, config)

    def _media(self, modality: str, kwargs: dict[str, Any], plans: Sequence[ItemPlan]) -> _Images:
        return _Images(self, self._parse_and_validate_image_input(**kwargs))

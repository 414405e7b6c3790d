# SPDX-License-Identifier: Apache-2.0
"""LLaVA-OneVision, with images of a base view and crops, and videos of pooled frames.

The model may scale the image that its crops make up, and tokens then no longer belong to single
crops. An image therefore has two units, the base view and the scaled image. A video has one unit
per frame. Kept tokens are in the model's own order, without its newline tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from transformers.models.llava_onevision.modeling_llava_onevision import (
    get_anyres_image_grid_shape,
)
from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionMultiModalProcessor,
    LlavaOnevisionProcessingInfo,
)
from vllm.multimodal.inputs import MultiModalKwargsItem

from anchorprune_vllm.models.llava.frames import pooled_side, unpruned_index_between_newlines
from anchorprune_vllm.models.llava.siglip import SiglipPrunedModel, SiglipPruningProcessor
from anchorprune_vllm.models.pruned_model import UnprunedLimits, prunes_with
from anchorprune_vllm.plan import ItemPlan, MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.signals.features import MediaFeatures
from anchorprune_vllm.worker.positions import MediaPositions
from anchorprune_vllm.worker.pruner import MediaBatch

_PROFILED_FRAMES = 16  # vLLM reserves memory for a video of this length, if it fits the context


class OnevisionPruningProcessor(SiglipPruningProcessor):
    """A mixin over the processor of LLaVA-OneVision or a similar model."""

    def _count_tokens(
        self, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        fields: Any = item.get_data()
        if modality == "video":
            return self._count_video(len(fields["pixel_values_videos"]))
        return self._count_image(fields["image_sizes"].tolist())

    def _count_video(self, frames: int) -> MediaTokens:
        size = self.info.get_image_size_with_most_features()  # any size: frames are scaled anyway
        sizes = {"image_width": size.width, "image_height": size.height}
        in_frame = self.info._get_num_frame_tokens(**sizes)
        return MediaTokens(
            unpruned=self.info.get_num_video_tokens(**sizes, num_frames=frames),
            unit_sizes=(in_frame,) * frames,
            unit_widths=(isqrt(in_frame),) * frames,
        )

    def _count_image(self, image_size: Sequence[int]) -> MediaTokens:
        height, width = image_size
        side = self.info.get_vision_encoder_info().get_patch_grid_length()
        grid = grid_of(self.info.get_hf_config(), image_size)
        shown, newlines = self.info._get_num_unpadded_features(
            original_height=height,
            original_width=width,
            npatches=side,
            num_patch_height=grid[0],
            num_patch_width=grid[1],
        )
        # There is one newline after each row. Nothing is left of a very flat image.
        width = shown // newlines if newlines else 0
        return MediaTokens(side * side + shown + newlines, (side * side, shown), (side, width))


def grid_of(hf_config: Any, image_size: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of an image's crops, from its height and width."""
    return get_anyres_image_grid_shape(
        tuple(image_size), hf_config.image_grid_pinpoints, hf_config.vision_config.image_size
    )


class _Images:
    """The images of one call, as a `MediaBatch`."""

    project: Callable[[Tensor], Tensor] | None = None

    def __init__(self, model: Any, pixel_values: Sequence[Tensor], image_sizes: Tensor) -> None:
        self._model = model
        self._tiles = pixel_values
        self._sizes = image_sizes

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        tiles = [self._tiles[i] for i in items]
        counts = [len(image) for image in tiles]

        def merge(patches: Tensor) -> list[Tensor]:
            """Return tiles [T, P, C] as the model lays out each image, without newlines: [N, C]."""
            return [
                self._model._merge_image_patch_embeddings(
                    self._sizes[i], image, strategy="spatial_unpad"
                )
                for i, image in zip(items, patches.split(counts), strict=True)
            ]

        return self._model.encode_items(torch.cat(tiles), merge)

    def embed_unpruned(self, items: list[int]) -> Sequence[Tensor]:
        return LlavaOnevisionForConditionalGeneration.embed_multimodal(
            self._model,
            pixel_values=[self._tiles[i] for i in items],
            image_sizes=torch.stack([self._sizes[i] for i in items]),
        )

    def positions(self, item: int, plan: ItemPlan) -> MediaPositions | None:
        def unpruned_index() -> Tensor:
            (base, shown), (_, width) = plan.tokens.unit_sizes, plan.tokens.unit_widths
            behind = base + unpruned_index_between_newlines(shown, width or None)
            return torch.cat([torch.arange(base), behind])

        return self._model.linear_positions(plan, unpruned_index)


class _Videos:
    """The videos of one call, as a `MediaBatch`."""

    project: Callable[[Tensor], Tensor] | None = None

    def __init__(self, model: Any, videos: Sequence[Tensor]) -> None:
        self._model = model
        self._videos = videos

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        # The tower gets a long video in parts, no larger than in an unpruned engine.
        at_once = self._model.frames_at_once()
        parts = [
            self._model.encode_items(pixels, self._pool)[0]
            for pixels in torch.cat([self._videos[i] for i in items]).split(at_once)
        ]
        sizes = [len(self._videos[i]) * self._model.tokens_per_frame() for i in items]
        return MediaFeatures.joined(parts).regrouped(lambda part: part.split(sizes))

    def _pool(self, patches: Tensor) -> list[Tensor]:
        """Pool frames [F, P, C] to one item [N, C]."""
        return [self._model.apply_pooling(patches).flatten(0, 1)]

    def embed_unpruned(self, items: list[int]) -> Sequence[Tensor]:
        embeddings = LlavaOnevisionForConditionalGeneration.embed_multimodal(
            self._model, pixel_values_videos=[self._videos[i] for i in items]
        )
        # For videos that differ in length, vLLM returns [1, N, H].
        return [rows.flatten(0, -2) for rows in embeddings]

    def positions(self, item: int, plan: ItemPlan) -> MediaPositions | None:
        every = self._model.newline_every()
        return self._model.linear_positions(
            plan, lambda: unpruned_index_between_newlines(plan.tokens.candidates, every)
        )


class OnevisionPrunedModel(SiglipPrunedModel):
    """A mixin over LLaVA-OneVision or a similar model."""

    apply_pooling: Any

    def _media(
        self, modality: str, kwargs: dict[str, Any], plans: Sequence[ItemPlan]
    ) -> MediaBatch:
        if modality == "video":
            return _Videos(self, kwargs["pixel_values_videos"])
        return _Images(self, kwargs["pixel_values"], kwargs["image_sizes"])

    def frames_at_once(self) -> int:
        """Return the most frames that vLLM gives to the tower at once when nothing is pruned."""
        tokens = self.tokens_per_frame()
        profiled = min(_PROFILED_FRAMES, self._max_model_len // tokens)
        return max(1, profiled, self._max_encoder_tokens // tokens)

    def tokens_per_frame(self) -> int:
        """Return the tokens of a pooled frame."""
        vision = self.config.vision_config
        return pooled_side(vision.image_size // vision.patch_size, "bilinear", stride=2) ** 2

    def newline_every(self) -> int | None:
        """Return the number of a video's tokens after which a newline follows.

        Returns None if there is at most one newline, at the end.
        """
        return None


class OnevisionUnprunedLimits(UnprunedLimits):
    """A mixin that computes the size of the largest image.

    vLLM's own constant is for one size of tiles, and is not exact even for that.
    """

    @cached_property
    def _max_image_tokens(self) -> int:
        """Return the most tokens of any image.

        In each grid, an image may be letterboxed above and below, or at the sides.
        """
        info: Any = self
        config, side = info.get_hf_config(), info.get_vision_encoder_info().get_patch_grid_length()
        most = 0
        for height, width in config.image_grid_pinpoints:
            rows = height // config.vision_config.image_size
            columns = width // config.vision_config.image_size
            shapes = [(shown, columns * side) for shown in range(1, rows * side + 1)]
            shapes += [(rows * side, shown) for shown in range(1, columns * side + 1)]
            for shown_rows, shown_columns in shapes:
                counts = info._get_num_unpadded_features(
                    original_height=shown_rows,
                    original_width=shown_columns,
                    npatches=side,
                    num_patch_height=rows,
                    num_patch_width=columns,
                )
                most = max(most, sum(counts))
        return side * side + most

    def get_max_image_tokens(self) -> int:
        return self._max_image_tokens


class PrunedOnevisionInfo(OnevisionUnprunedLimits, LlavaOnevisionProcessingInfo):
    """vLLM's processing info of LLaVA-OneVision, with the sizes of the largest unpruned items."""


class PrunedOnevisionProcessor(OnevisionPruningProcessor, LlavaOnevisionMultiModalProcessor):
    """A processor of LLaVA-OneVision prompts with K placeholders per image or video."""


@prunes_with(PrunedOnevisionProcessor, PrunedOnevisionInfo)
class PrunedOnevision(OnevisionPrunedModel, LlavaOnevisionForConditionalGeneration):
    """vLLM's LLaVA-OneVision, pruned if the HF config has a budget."""

# SPDX-License-Identifier: Apache-2.0
"""LLaVA-Video in its original format, which vLLM does not know: with and without pruning.

Images are LLaVA-OneVision's. Frames are pooled, and newline tokens put among them, as the config
says; the rules are those of the original code (see `llava_video_config`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
)
from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionDummyInputsBuilder,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionMultiModalProcessor,
    LlavaOnevisionProcessingInfo,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY

from anchorprune_vllm.models.llava_onevision import (
    LargestOnevisionInfo,
    OnevisionPrunedModel,
    OnevisionPruningProcessor,
)
from anchorprune_vllm.models.llava_video_config import MODEL_TYPE, PLACEHOLDERS, LlavaVideoConfig
from anchorprune_vllm.models.pruned import prunes_with

_SAMPLED_FRAMES = 32  # from a video, unless --media-io-kwargs says otherwise


def pooled_side(side: int, mode: str, stride: int) -> int:
    """Tokens in a row of a pooled frame that has `side` patches in a row."""
    return math.ceil(side / stride) if mode == "bilinear" else side // stride


def pool_frames(frames: Tensor, mode: str, stride: int) -> Tensor:
    """Square frames of patches [F, P, C] to [F, N, C]."""
    side = math.isqrt(frames.shape[1])
    grid = frames.transpose(1, 2).unflatten(2, (side, side))  # [F, C, side, side]
    if mode == "average":
        pooled = F.avg_pool2d(grid, stride)
    elif mode == "max":
        pooled = F.max_pool2d(grid, stride)
    else:
        size = pooled_side(side, mode, stride)
        pooled = F.interpolate(grid, size=(size, size), mode="bilinear")
    return pooled.flatten(2).transpose(1, 2)


def newline_spacing(position: str, side: int) -> int | None:
    """Tokens behind which a newline follows, in frames of `side` x `side`; None: none inside."""
    return {"grid": side, "frame": side * side}.get(position)


def count_newlines(position: str, frames: int, side: int) -> int:
    """Newline tokens of a video."""
    return {"grid": frames * side, "frame": frames, "one_token": 1, "no_token": 0}[position]


def with_newlines(frames: Tensor, newline: Tensor, position: str) -> Tensor:
    """Tokens [F, N, H] of a video in a line, newlines [H] among them: [T, H]."""
    tokens = frames.flatten(0, 1)
    every = newline_spacing(position, math.isqrt(frames.shape[1]))
    if every is not None:
        lines = tokens.unflatten(0, (-1, every))
        return torch.cat([lines, newline.expand(len(lines), 1, -1)], dim=1).flatten(0, 1)
    return torch.cat([tokens, newline[None]]) if position == "one_token" else tokens


class LlavaVideoInfo(LargestOnevisionInfo, LlavaOnevisionProcessingInfo):
    """What vLLM asks about LLaVA-Video's inputs. The checkpoint has no processor: it is made."""

    def get_hf_config(self) -> LlavaVideoConfig:
        return self.ctx.get_hf_config(LlavaVideoConfig)

    def get_hf_processor(self, **kwargs: object) -> LlavaOnevisionProcessor:
        return self._hf_processor

    @cached_property
    def _hf_processor(self) -> LlavaOnevisionProcessor:
        config = self.get_hf_config()
        tokenizer = self.get_tokenizer()
        ids = tuple(tokenizer.convert_tokens_to_ids(list(PLACEHOLDERS)))
        expected = (config.image_token_index, config.video_token_index)
        if ids != expected:
            overrides = dict(zip(("image_token_index", "video_token_index"), ids, strict=True))
            raise ValueError(
                f"llava_qwen: this tokenizer has {PLACEHOLDERS} at {ids}, the config at "
                f"{expected}; give --hf-overrides '{json.dumps(overrides)}'"
            )
        side = config.vision_config.image_size
        pixels = {
            "size": {"height": side, "width": side},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
        return LlavaOnevisionProcessor(
            image_processor=LlavaOnevisionImageProcessor(
                **pixels, image_grid_pinpoints=config.image_grid_pinpoints
            ),
            tokenizer=tokenizer,
            video_processor=LlavaOnevisionVideoProcessor(**pixels),
            num_image_tokens=self.get_vision_encoder_info().get_patch_grid_length() ** 2,
            vision_feature_select_strategy="full",
            image_token=PLACEHOLDERS[0],
            video_token=PLACEHOLDERS[1],
        )

    def _side(self) -> int:
        config = self.get_hf_config()
        patches = self.get_vision_encoder_info().get_patch_grid_length()
        return pooled_side(patches, config.mm_spatial_pool_mode, config.mm_spatial_pool_stride)

    def _get_num_frame_tokens(self, *, image_width: int, image_height: int) -> int:
        return self._side() ** 2

    def get_num_video_tokens(self, *, image_width: int, image_height: int, num_frames: int) -> int:
        side = self._side()
        newlines = count_newlines(self.get_hf_config().mm_newline_position, num_frames, side)
        return num_frames * side * side + newlines

    def get_num_frames_with_most_features(self, seq_len: int, mm_counts: Mapping[str, int]) -> int:
        """As many as vLLM's loader takes from a video, as far as the context allows."""
        media_io = self.ctx.get_mm_config().media_io_kwargs.get("video", {})
        sampled = media_io.get("num_frames", -1)
        videos = max(mm_counts.get("video", 0), 1)
        fitting = self._get_max_video_frames(seq_len) // videos
        return max(1, min(fitting, sampled if sampled > 0 else _SAMPLED_FRAMES))


class LlavaVideoProcessor(LlavaOnevisionMultiModalProcessor):
    """Prompts with a placeholder for each token."""


@MULTIMODAL_REGISTRY.register_processor(
    LlavaVideoProcessor, info=LlavaVideoInfo, dummy_inputs=LlavaOnevisionDummyInputsBuilder
)
class LlavaVideo(LlavaOnevisionForConditionalGeneration):
    """LLaVA-Video on vLLM's LLaVA-OneVision."""

    config: LlavaVideoConfig

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.vision_tower.vision_tower.": "vision_tower.",
            "model.mm_projector.0.": "multi_modal_projector.linear_1.",
            "model.mm_projector.2.": "multi_modal_projector.linear_2.",
            "model.image_newline": "image_newline",
            "model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
        }
    )

    def apply_pooling(self, image_features: Tensor, stride: int = 2) -> Tensor:
        config = self.config
        return pool_frames(
            image_features, config.mm_spatial_pool_mode, config.mm_spatial_pool_stride
        )

    def _process_video_pixels(self, inputs: Any) -> list[Tensor]:
        videos = inputs["pixel_values_videos"]
        frames = self._video_pixels_to_features(self.vision_tower, torch.cat(list(videos)))
        return [
            with_newlines(tokens, self.image_newline, self.config.mm_newline_position)
            for tokens in frames.split([len(video) for video in videos])
        ]


class PrunedLlavaVideoProcessor(OnevisionPruningProcessor, LlavaVideoProcessor):
    """LLaVA-Video prompts with K placeholders per image or video."""


@prunes_with(PrunedLlavaVideoProcessor, LlavaVideoInfo)
class PrunedLlavaVideo(OnevisionPrunedModel, LlavaVideo):
    """LLaVA-Video, pruned when the HF config carries a budget."""

    @classmethod
    def prepare(cls, model_config: Any) -> None:
        model_config.hf_config.check()
        if model_config.tokenizer_mode == "auto":
            model_config.tokenizer_mode = MODEL_TYPE  # registered by the plugin

    def newline_every(self) -> int | None:
        side = math.isqrt(self.tokens_per_frame())
        return newline_spacing(self.config.mm_newline_position, side)

# SPDX-License-Identifier: Apache-2.0
"""LLaVA-Video in its original format, which vLLM does not support, with and without pruning.

Images are processed as in LLaVA-OneVision. The config says how frames are pooled and where newline
tokens stand among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
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

from anchorprune_vllm.models.llava.frames import (
    count_newlines,
    newline_spacing,
    pool_frames,
    pooled_side,
    with_newlines,
)
from anchorprune_vllm.models.llava.llava_onevision import (
    OnevisionPrunedModel,
    OnevisionPruningProcessor,
    OnevisionUnprunedLimits,
)
from anchorprune_vllm.models.llava.llava_video_config import (
    MODEL_TYPE,
    PLACEHOLDERS,
    LlavaVideoConfig,
)
from anchorprune_vllm.models.pruned_model import prunes_with

_SAMPLED_FRAMES = 32  # frames that vLLM reads from a video, unless --media-io-kwargs differs


def frame_side(config: LlavaVideoConfig) -> int:
    """Return the tokens in a row of a frame."""
    patches = config.vision_config.image_size // config.vision_config.patch_size
    return pooled_side(patches, config.mm_spatial_pool_mode, config.mm_spatial_pool_stride)


class LlavaVideoInfo(OnevisionUnprunedLimits, LlavaOnevisionProcessingInfo):
    """Processing info of LLaVA-Video, which makes the processor that the checkpoint lacks."""

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
        if ids != expected:  # the vocabulary is not that of Qwen2
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

    def _get_num_frame_tokens(self, *, image_width: int, image_height: int) -> int:
        return frame_side(self.get_hf_config()) ** 2

    def get_num_video_tokens(self, *, image_width: int, image_height: int, num_frames: int) -> int:
        side = frame_side(self.get_hf_config())
        newlines = count_newlines(self.get_hf_config().mm_newline_position, num_frames, side)
        return num_frames * side * side + newlines

    def get_num_frames_with_most_features(self, seq_len: int, mm_counts: Mapping[str, int]) -> int:
        """Return the frames that vLLM's loader reads from a video, as far as the context allows."""
        media_io = self.ctx.get_mm_config().media_io_kwargs.get("video", {})
        sampled = media_io.get("num_frames", -1)
        videos = max(mm_counts.get("video", 0), 1)
        fitting = self._get_max_video_frames(seq_len) // videos
        return max(1, min(fitting, sampled if sampled > 0 else _SAMPLED_FRAMES))


@MULTIMODAL_REGISTRY.register_processor(
    LlavaOnevisionMultiModalProcessor,
    info=LlavaVideoInfo,
    dummy_inputs=LlavaOnevisionDummyInputsBuilder,
)
class LlavaVideo(LlavaOnevisionForConditionalGeneration):
    """LLaVA-Video, built on vLLM's LLaVA-OneVision."""

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

    def apply_pooling(self, image_features: Tensor, stride: int | None = None) -> Tensor:
        mode = self.config.mm_spatial_pool_mode
        return pool_frames(image_features, mode, stride or self.config.mm_spatial_pool_stride)

    def _process_video_pixels(self, inputs: Any) -> list[Tensor]:
        videos = inputs["pixel_values_videos"]
        frames = self._video_pixels_to_features(self.vision_tower, torch.cat(list(videos)))
        return [
            with_newlines(tokens, self.image_newline, self.config.mm_newline_position)
            for tokens in frames.split([len(video) for video in videos])
        ]


class PrunedLlavaVideoProcessor(OnevisionPruningProcessor, LlavaOnevisionMultiModalProcessor):
    """A processor of LLaVA-Video prompts with K placeholders per image or video."""


@prunes_with(PrunedLlavaVideoProcessor, LlavaVideoInfo)
class PrunedLlavaVideo(OnevisionPrunedModel, LlavaVideo):
    """LLaVA-Video, pruned if the HF config has a budget."""

    @classmethod
    def prepare(cls, model_config: Any) -> None:
        config = model_config.hf_config
        if not isinstance(config, LlavaVideoConfig):
            raise ValueError(
                f"llava_qwen: this checkpoint has model_type {config.model_type!r}; a "
                f"LlavaQwenForCausalLM needs {MODEL_TYPE!r} in its config.json"
            )
        config.check()
        # The plugin registers a tokenizer mode, because the checkpoint's tokenizer has no
        # placeholders.
        if model_config.tokenizer_mode not in ("auto", "hf", MODEL_TYPE):
            raise ValueError(
                f"llava_qwen: --tokenizer-mode {model_config.tokenizer_mode} has no placeholders "
                "for images and videos; leave it out"
            )
        model_config.tokenizer_mode = MODEL_TYPE

    def tokens_per_frame(self) -> int:
        return frame_side(self.config) ** 2

    def newline_every(self) -> int | None:
        return newline_spacing(self.config.mm_newline_position, frame_side(self.config))

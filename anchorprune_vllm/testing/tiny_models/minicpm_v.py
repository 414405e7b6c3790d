# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V 4.6 and 4.7: an image and its slices, on Qwen3.5's language model."""

from typing import Any

from transformers import (
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
    MiniCPMV4_7Config,
    MiniCPMV4_7ForConditionalGeneration,
    MiniCPMV4_7Processor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen3_5TextConfig,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)
from anchorprune_vllm.testing.tiny_models.qwen_vl import BFLOAT16, LINEAR_ATTENTION

_SLICE, _PATCH = 224, 14
# Full attention comes first: what linear attention has forgotten, it cannot find.
_TEXT = LINEAR_ATTENTION | {"layer_types": ["full_attention", "linear_attention"] * 2}


def minicpm_v_4_6() -> Checkpoint:
    tokenizer = _tokenizer()
    config = MiniCPMV4_6Config(**_config(tokenizer))
    processor = MiniCPMV4_6Processor(**_processors(tokenizer))
    return _checkpoint(MiniCPMV4_6ForConditionalGeneration, config, processor)


def minicpm_v_4_7() -> Checkpoint:
    """Describe a model that places slices on a canvas, by the tokens around them."""
    tokenizer = _tokenizer()
    tags = {
        "image_start_id": "<image>",
        "image_end_id": "</image>",
        "slice_start_id": "<slice>",
        "slice_end_id": "</slice>",
        "newline_id": "\n",
    }
    ids = {name: tokenizer.convert_tokens_to_ids(tag) for name, tag in tags.items()}
    config = MiniCPMV4_7Config(**_config(tokenizer), **ids)
    processor = MiniCPMV4_7Processor(**_processors(tokenizer))
    return _checkpoint(MiniCPMV4_7ForConditionalGeneration, config, processor)


def _checkpoint(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, processor: ProcessorMixin
) -> Checkpoint:
    return Checkpoint(
        model_class,
        config,
        processor,
        image="<|image_pad|>\n",
        video="<|video_pad|>\n",
        engine_arguments=BFLOAT16,
        visual_tokens=(45, 75),
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(
        words=["\n"],
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        image_start_token="<image>",
        image_end_token="</image>",
        slice_start_token="<slice>",
        slice_end_token="</slice>",
        image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
    )


def _config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vision_config": {**TOWER, "image_size": _SLICE, "patch_size": _PATCH},
        "text_config": text_config(Qwen3_5TextConfig, tokenizer, **_TEXT).to_dict(),
        "insert_layer_id": 0,
        "image_size": _SLICE,
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    }


def _processors(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    slices: dict[str, Any] = {
        "scale_resolution": _SLICE,
        "patch_size": _PATCH,
        "max_slice_nums": 4,
    }
    return {
        "image_processor": MiniCPMV4_6ImageProcessor(**slices),
        "video_processor": MiniCPMV4_6VideoProcessor(**slices),
        "tokenizer": tokenizer,
    }

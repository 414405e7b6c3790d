# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL, Qwen3-VL with DeepStack, Qwen3.5, those with experts, and models built on them."""

from dataclasses import replace
from typing import Any

from transformers import (
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Exaone4_5_Processor,
    Exaone4Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLTextConfig,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeTextConfig,
    Qwen3VLProcessor,
    Qwen3VLTextConfig,
    Qwen3VLVideoProcessor,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    Checkpoint,
    make_tokenizer,
    text_config,
)

_MERGE = 2
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_INTERLEAVED_MROPE = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [12, 10, 10],
    "mrope_interleaved": True,
}
_VISION_OF_QWEN3 = {
    "depth": 4,
    "hidden_size": 64,
    "out_hidden_size": 128,
    "intermediate_size": 128,
    "patch_size": 16,
    "num_position_embeddings": 256,
}
DEEPSTACK_VISION = {**_VISION_OF_QWEN3, "deepstack_visual_indexes": [1, 2]}
DEEPSTACK_TEXT: dict[str, Any] = {
    "num_hidden_layers": 4,  # more than there are layers of the tower to add
    "head_dim": 64,
    "rope_parameters": _INTERLEAVED_MROPE,
}
WINDOWED_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 128,
    "out_hidden_size": 128,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}
"""Of Qwen2.5-VL."""
BFLOAT16 = {"dtype": "bfloat16"}
"""Linear attention has no other precision on a CPU."""
LINEAR_ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {**_INTERLEAVED_MROPE, "partial_rotary_factor": 1.0},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
}


def _tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(
        ["<|vision_pad|>"],
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_bos_token="<|vision_start|>",
        vision_eos_token="<|vision_end|>",
    )


def _config(
    config_class: type[PreTrainedConfig],
    tokenizer: PreTrainedTokenizerFast,
    text: PreTrainedConfig,
    vision: dict[str, Any],
) -> PreTrainedConfig:
    token_id = tokenizer.convert_tokens_to_ids
    tiny = {"num_heads": 2, "spatial_merge_size": _MERGE, "temporal_patch_size": 2}
    return config_class(
        text_config=text.to_dict(),
        vision_config=tiny | vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )


def pixel_limits(patch: int) -> dict[str, Any]:
    """Let images and videos have between 16 and 256 visual tokens (a frame's)."""
    token = (patch * _MERGE) ** 2
    return {
        "size": {"shortest_edge": 16 * token, "longest_edge": 256 * token},
        "patch_size": patch,
        "merge_size": _MERGE,
        "temporal_patch_size": 2,
    }


def qwen2_vl() -> Checkpoint:
    tokenizer = _tokenizer()
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    text = text_config(Qwen2VLTextConfig, tokenizer, rope_parameters=rope)
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2, "patch_size": 14}
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixel_limits(14)),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixel_limits(14)),
    )
    return Checkpoint(
        Qwen2VLForConditionalGeneration,
        _config(Qwen2VLConfig, tokenizer, text, vision),
        processor,
        image=_IMAGE,
        video=_VIDEO,
        visual_tokens=(77, 234),
    )


def exaone4_5() -> Checkpoint:
    """Describe a model whose questions change probabilities, but seldom the words of an answer."""
    tokenizer = _tokenizer()
    text = text_config(
        Exaone4Config,
        tokenizer,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        sliding_window=512,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    vision = WINDOWED_VISION | {"num_key_value_heads": 1}
    processor = Exaone4_5_Processor(
        Qwen2VLImageProcessor(**pixel_limits(14)),
        tokenizer,
        Qwen2VLVideoProcessor(**pixel_limits(14)),
    )
    return Checkpoint(
        Exaone4_5_ForConditionalGeneration,
        _config(Exaone4_5_Config, tokenizer, text, vision),
        processor,
        image=_IMAGE,
        video=_VIDEO,
        visual_tokens=(77, 234),
    )


def qwen3_vl() -> Checkpoint:
    tokenizer = _tokenizer()
    text = text_config(Qwen3VLTextConfig, tokenizer, **DEEPSTACK_TEXT)
    return _qwen3(
        Qwen3VLForConditionalGeneration,
        _config(Qwen3VLConfig, tokenizer, text, DEEPSTACK_VISION),
        tokenizer,
    )


def qwen3_vl_moe() -> Checkpoint:
    tokenizer = _tokenizer()
    text = text_config(
        Qwen3VLMoeTextConfig, tokenizer, **DEEPSTACK_TEXT, **EXPERTS, norm_topk_prob=True
    )
    return _qwen3(
        Qwen3VLMoeForConditionalGeneration,
        _config(Qwen3VLMoeConfig, tokenizer, text, DEEPSTACK_VISION),
        tokenizer,
        transposed_on_hub=["mlp.experts."],
    )


def qwen3_5() -> Checkpoint:
    tokenizer = _tokenizer()
    text = text_config(Qwen3_5TextConfig, tokenizer, **LINEAR_ATTENTION)
    return _qwen3(
        Qwen3_5ForConditionalGeneration,
        _config(Qwen3_5Config, tokenizer, text, _VISION_OF_QWEN3),
        tokenizer,
        engine_arguments=BFLOAT16,
    )


def qwen3_5_moe() -> Checkpoint:
    tokenizer = _tokenizer()
    text = text_config(
        Qwen3_5MoeTextConfig,
        tokenizer,
        **LINEAR_ATTENTION,
        **EXPERTS,
        shared_expert_intermediate_size=128,
    )
    return _qwen3(
        Qwen3_5MoeForConditionalGeneration,
        _config(Qwen3_5MoeConfig, tokenizer, text, _VISION_OF_QWEN3),
        tokenizer,
        engine_arguments=BFLOAT16,
    )


def interns2_preview() -> Checkpoint:
    """Describe Qwen3.5 with experts under another name; its reader of time series is left out."""
    return replace(qwen3_5_moe(), architecture="InternS2PreviewForConditionalGeneration")


def opencua() -> Checkpoint:
    """Describe Qwen2.5-VL's tower before a Qwen2, which has ordinary rotary embeddings."""
    placeholder = "<|media_placeholder|>"
    tokenizer = make_tokenizer(image_token=placeholder)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen2_5_VLConfig(
        text_config=text_config(Qwen2_5_VLTextConfig, tokenizer, rope_parameters=rope).to_dict(),
        vision_config=WINDOWED_VISION,
        image_token_id=tokenizer.convert_tokens_to_ids(placeholder),
        tie_word_embeddings=False,
    )
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixel_limits(14)),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixel_limits(14)),
    )
    return Checkpoint(
        Qwen2_5_VLForConditionalGeneration,
        config,
        processor,
        image=placeholder,
        visual_tokens=(77, 234),
        architecture="OpenCUAForConditionalGeneration",
    )


def _qwen3(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
    **others: Any,
) -> Checkpoint:
    half = [0.5] * 3  # as for videos, which vLLM normalises like images
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixel_limits(16), image_mean=half, image_std=half),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**pixel_limits(16)),
    )
    return Checkpoint(
        model_class,
        config,
        processor,
        image=_IMAGE,
        video=_VIDEO,
        visual_tokens=(54, 234),
        **others,
    )

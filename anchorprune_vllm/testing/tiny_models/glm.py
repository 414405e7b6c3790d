# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V and its relatives."""

from typing import Any

from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm4vMoeTextConfig,
    Glm4vProcessor,
    Glm4vTextConfig,
    Glm4vVideoProcessor,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    GlmOcrTextConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    Checkpoint,
    make_tokenizer,
    text_config,
)

_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
_VIDEO = "<|begin_of_video|><|video|><|end_of_video|>"
_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 128,
    "out_hidden_size": 128,
    "image_size": 336,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [4, 6, 6],
    "partial_rotary_factor": 0.5,
}


def glm4v() -> Checkpoint:
    tokenizer = _tokenizer()
    # transformers' class has the biases in any case; vLLM's wants to be told, as on the hub.
    text = text_config(Glm4vTextConfig, tokenizer, rope_parameters=_ROPE, attention_bias=True)
    return _checkpoint(Glm4vForConditionalGeneration, Glm4vConfig, tokenizer, text)


def glm4v_moe() -> Checkpoint:
    tokenizer = _tokenizer()
    text = text_config(
        Glm4vMoeTextConfig,
        tokenizer,
        head_dim=64,
        rope_parameters=_ROPE,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=192,
        use_qk_norm=False,
    )
    return _checkpoint(Glm4vMoeForConditionalGeneration, Glm4vMoeConfig, tokenizer, text)


def glm_ocr() -> Checkpoint:
    tokenizer = _tokenizer()
    rope = {**_ROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 1.0}
    text = text_config(GlmOcrTextConfig, tokenizer, head_dim=64, rope_parameters=rope)
    return _checkpoint(GlmOcrForConditionalGeneration, GlmOcrConfig, tokenizer, text)


def _checkpoint(
    model_class: type[PreTrainedModel],
    config_class: type[PreTrainedConfig],
    tokenizer: PreTrainedTokenizerFast,
    text: PreTrainedConfig,
) -> Checkpoint:
    return Checkpoint(
        model_class,
        config_class(text_config=text.to_dict(), vision_config=_VISION, **_token_ids(tokenizer)),
        _processor(tokenizer),
        image=_IMAGE,
        video=_VIDEO,
        visual_tokens=(77, 234),
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    edges = [f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")]
    return make_tokenizer(
        ["[gMASK]", "<sop>", *edges], image_token="<|image|>", video_token="<|video|>"
    )


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _processor(tokenizer: PreTrainedTokenizerFast) -> Glm4vProcessor:
    patches: dict[str, Any] = {
        "size": {"shortest_edge": 112 * 112, "longest_edge": 2 * 448 * 448},
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    return Glm4vProcessor(
        image_processor=Glm4vImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=Glm4vVideoProcessor(**patches),
    )

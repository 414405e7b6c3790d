# SPDX-License-Identifier: Apache-2.0
"""Pixtral in the hub's format, Mistral Small 3.1 and LightOnOCR: images of many sizes."""

from transformers import (
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralImageProcessor,
    PixtralProcessor,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_LONGEST, _PATCH = 336, 14


def mistral3() -> Checkpoint:
    tokenizer = _tokenizer()
    config = Mistral3Config(
        vision_config=_vision(),
        text_config=text_config(MistralConfig, tokenizer, head_dim=64),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return Checkpoint(
        Mistral3ForConditionalGeneration,
        config,
        PixtralProcessor(_image_processor(), tokenizer, patch_size=_PATCH, spatial_merge_size=2),
        image="[IMG]",
        visual_tokens=(88, 108),
    )


def pixtral_hf() -> Checkpoint:
    tokenizer = _tokenizer()
    config = LlavaConfig(
        vision_config=_vision(_LONGEST // 2),
        text_config=text_config(MistralConfig, tokenizer, head_dim=64),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    return Checkpoint(
        LlavaForConditionalGeneration,
        config,
        PixtralProcessor(_image_processor(_LONGEST // 2), tokenizer, patch_size=_PATCH),
        image="[IMG]",
        visual_tokens=(96, 108),
    )


def lighton_ocr() -> Checkpoint:
    tokens = {
        "image_token": "<|image_pad|>",
        "image_break_token": "<|vision_pad|>",
        "image_end_token": "<|vision_end|>",
    }
    tokenizer = make_tokenizer(**tokens)
    image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    parts = {
        "vision_config": _vision(),
        "text_config": text_config(Qwen3Config, tokenizer, num_hidden_layers=4, head_dim=64),
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    }
    return Checkpoint(
        LightOnOcrForConditionalGeneration,
        LightOnOcrConfig(**parts, image_token_id=image_token_id),
        PixtralProcessor(
            _image_processor(), tokenizer, patch_size=_PATCH, spatial_merge_size=2, **tokens
        ),
        image="<|image_pad|>",
        visual_tokens=(88, 108),
        architecture="LightOnOCRForConditionalGeneration",
        # The hub's, and vLLM's, are of the older model.
        whole_config=Mistral3Config(**parts, image_token_index=image_token_id),
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(
        image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]"
    )


def _vision(longest: int = _LONGEST) -> PixtralVisionConfig:
    return PixtralVisionConfig(**TOWER, image_size=longest, patch_size=_PATCH)


def _image_processor(longest: int = _LONGEST) -> PixtralImageProcessor:
    return PixtralImageProcessor(size={"longest_edge": longest}, patch_size=_PATCH)

# SPDX-License-Identifier: Apache-2.0
"""Idefics3 and SmolVLM: tiles in rows and columns, and the whole image."""

from typing import Any

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_TILE, _PATCH, _SCALE = 112, 14, 2
_SIZES: dict[str, Any] = {
    "size": {"longest_edge": 3 * _TILE},
    "max_image_size": {"longest_edge": _TILE},
}
_TOKENS = (_TILE // _PATCH // _SCALE) ** 2


def idefics3() -> Checkpoint:
    tokenizer = _tokenizer()
    image_processor = Idefics3ImageProcessor(**_SIZES, do_image_splitting=True)
    return Checkpoint(
        Idefics3ForConditionalGeneration,
        _config(Idefics3Config, tokenizer),
        Idefics3Processor(image_processor, tokenizer, image_seq_len=_TOKENS),
        image="<image>",
        visual_tokens=(112, 160),
    )


def smolvlm() -> Checkpoint:
    tokenizer = _tokenizer()
    processor = SmolVLMProcessor(
        SmolVLMImageProcessor(**_SIZES, do_image_splitting=True),
        tokenizer,
        SmolVLMVideoProcessor(**_SIZES | {"size": {"longest_edge": _TILE}}),
        image_seq_len=_TOKENS,
    )
    return Checkpoint(
        SmolVLMForConditionalGeneration,
        _config(SmolVLMConfig, tokenizer),
        processor,
        image="<image>",
        visual_tokens=(112, 160),
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(
        [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )


def _config(
    config_class: type[PreTrainedConfig], tokenizer: PreTrainedTokenizerFast
) -> PreTrainedConfig:
    return config_class(
        vision_config={**TOWER, "image_size": _TILE, "patch_size": _PATCH},
        text_config=text_config(LlamaConfig, tokenizer),
        scale_factor=_SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )

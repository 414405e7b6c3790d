# SPDX-License-Identifier: Apache-2.0
"""InternVL 3 and later, as transformers has it: tiles, and a thumbnail."""

from typing import Any

from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    InternVLVisionConfig,
    Qwen2Config,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_TILE, _PATCH = 112, 14
_TOKENS = (_TILE // _PATCH // 2) ** 2


def internvl() -> Checkpoint:
    return _checkpoint()


def intern_s1() -> Checkpoint:
    """Describe a model that vLLM serves as it does InternVL's."""
    return _checkpoint(architecture="InternS1ForConditionalGeneration")


def _checkpoint(**others: Any) -> Checkpoint:
    tokenizer = make_tokenizer(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(
            **TOWER, image_size=[_TILE, _TILE], patch_size=[_PATCH, _PATCH]
        ),
        text_config=text_config(Qwen2Config, tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=_TOKENS,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    size = {"height": _TILE, "width": _TILE}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(
            size=size, crop_to_patches=True, min_patches=1, max_patches=6
        ),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=_TOKENS,
    )
    return Checkpoint(
        InternVLForConditionalGeneration,
        config,
        processor,
        image="<IMG_CONTEXT>\n",
        video="<video>\n",
        visual_tokens=(112, 112),
        **others,
    )

# SPDX-License-Identifier: Apache-2.0
"""PaddleOCR-VL: images of any size."""

from transformers import (
    PaddleOCRTextConfig,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessor,
    PaddleOCRVLProcessor,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_PATCH, _MERGE = 14, 2
_TOKEN = (_PATCH * _MERGE) ** 2
_SIZE = {"shortest_edge": 16 * _TOKEN, "longest_edge": 256 * _TOKEN}
_ROPE = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [11, 11, 10]}


def paddle_ocr_vl() -> Checkpoint:
    tokenizer = make_tokenizer(
        ["<|video_pad|>"],
        image_token="<|IMAGE_PLACEHOLDER|>",
        image_start_token="<|IMAGE_START|>",
        image_end_token="<|IMAGE_END|>",
    )
    token_id = tokenizer.convert_tokens_to_ids
    config = PaddleOCRVLConfig(
        vision_config={**TOWER, "image_size": 112, "patch_size": _PATCH},
        text_config=text_config(
            PaddleOCRTextConfig, tokenizer, head_dim=64, rope_parameters=_ROPE
        ).to_dict(),
        image_token_id=token_id("<|IMAGE_PLACEHOLDER|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|IMAGE_START|>"),
        vision_end_token_id=token_id("<|IMAGE_END|>"),
        tie_word_embeddings=False,
    )
    return Checkpoint(
        PaddleOCRVLForConditionalGeneration,
        config,
        PaddleOCRVLProcessor(PaddleOCRVLImageProcessor(size=_SIZE), tokenizer),
        image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        visual_tokens=(77, 234),
    )

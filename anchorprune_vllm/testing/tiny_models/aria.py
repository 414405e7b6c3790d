# SPDX-License-Identifier: Apache-2.0
"""Aria: a projector that asks with a fixed number of queries, and experts."""

from transformers import (
    AriaConfig,
    AriaForConditionalGeneration,
    AriaImageProcessor,
    AriaProcessor,
    AriaTextConfig,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_SIZE, _TOKENS = 980, 64  # the processor takes no other size, but the half
_PATCH = 70


def aria() -> Checkpoint:
    tokenizer = make_tokenizer(image_token="<|img|>")
    config = AriaConfig(
        vision_config={
            **TOWER,
            "model_type": "idefics3_vision",
            "image_size": _SIZE,
            "patch_size": _PATCH,
        },
        text_config=text_config(
            AriaTextConfig, tokenizer, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<|img|>"),
        projector_patch_to_query_dict={(_SIZE // _PATCH) ** 2: _TOKENS},
    )
    image_processor = AriaImageProcessor(max_image_size=_SIZE, min_image_size=_SIZE // 4)
    return Checkpoint(
        AriaForConditionalGeneration,
        config,
        AriaProcessor(image_processor, tokenizer, size_conversion={_SIZE: _TOKENS}),
        image="<|img|>",
        visual_tokens=(64, 64),
    )

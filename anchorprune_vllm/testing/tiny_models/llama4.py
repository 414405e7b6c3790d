# SPDX-License-Identifier: Apache-2.0
"""Llama 4: tiles, and experts."""

from transformers import (
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4ImageProcessor,
    Llama4Processor,
    Llama4TextConfig,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_TILE, _PATCH, _RATIO = 112, 14, 0.5


def llama4() -> Checkpoint:
    tokenizer = make_tokenizer(
        [
            "<|image_start|>",
            "<|image_end|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ],
        image_token="<|image|>",
    )
    token_id = tokenizer.convert_tokens_to_ids
    text = text_config(
        Llama4TextConfig,
        tokenizer,
        head_dim=64,
        intermediate_size_mlp=256,
        num_local_experts=2,
    )
    vision = TOWER | {
        "intermediate_size": 256,  # four times the tower's size, which pixel shuffling asks for
        "vision_output_dim": 128,
        "image_size": _TILE,
        "patch_size": _PATCH,
        "pixel_shuffle_ratio": _RATIO,
        "projector_input_dim": 128,
        "projector_output_dim": 128,
    }
    config = Llama4Config(
        vision_config=vision,
        text_config=text.to_dict(),
        image_token_index=token_id("<|patch|>"),
        boi_token_index=token_id("<|image_start|>"),
        eoi_token_index=token_id("<|image_end|>"),
    )
    image_processor = Llama4ImageProcessor(
        size={"height": _TILE, "width": _TILE}, max_patches=6, resize_to_max_canvas=False
    )
    return Checkpoint(
        Llama4ForConditionalGeneration,
        config,
        Llama4Processor(image_processor, tokenizer, patch_size=_PATCH, pixel_shuffle_ratio=_RATIO),
        image="<|image|>",
        visual_tokens=(112, 112),
    )

# SPDX-License-Identifier: Apache-2.0
"""Command A Vision, of tiles of SigLIP, and North Micro Vision, with DeepStack."""

from transformers import (
    Cohere2Config,
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Cohere2VisionImageProcessor,
    Cohere2VisionProcessor,
    CohereCompassConfig,
    CohereCompassForConditionalGeneration,
    CohereCompassImageProcessor,
    CohereCompassProcessor,
    CohereCompassTextConfig,
    CohereCompassVideoProcessor,
    SiglipVisionConfig,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    SIGLIP_ON_THE_HUB,
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_TILE = 112


def cohere2_vision() -> Checkpoint:
    tokenizer = make_tokenizer(
        image_token="<|IMG_PATCH|>",
        boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )
    config = Cohere2VisionConfig(
        vision_config=SiglipVisionConfig(
            **TOWER, image_size=_TILE, patch_size=14, vision_use_head=False
        ),
        text_config=text_config(
            Cohere2Config,
            tokenizer,
            logit_scale=1.0,
            tie_word_embeddings=True,  # vLLM's has no other
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        downsample_factor=2,
        alignment_intermediate_size=256,
    )
    image_processor = Cohere2VisionImageProcessor(
        size={"height": _TILE, "width": _TILE}, max_patches=6, patch_size=4
    )
    return Checkpoint(
        Cohere2VisionForConditionalGeneration,
        config,
        Cohere2VisionProcessor(image_processor, tokenizer),
        image="<|IMG_PATCH|>",
        visual_tokens=(112, 112),
        hub_names=SIGLIP_ON_THE_HUB,
    )


def cohere_compass() -> Checkpoint:
    tokenizer = make_tokenizer(
        image_token="<|IMAGE_PAD|>",
        video_token="<|VIDEO_PAD|>",
        vision_start_token="<|VISION_START|>",
        vision_end_token="<|VISION_END|>",
    )
    token_id = tokenizer.convert_tokens_to_ids
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    }
    layers = ["sliding_attention", "full_attention"]
    text = text_config(
        CohereCompassTextConfig,
        tokenizer,
        num_hidden_layers=4,
        layer_types=layers * 2,
        sliding_window=512,
        rope_parameters=dict.fromkeys(layers, rope),
        logit_scale=1.0,
        tie_word_embeddings=True,
    )
    vision = {
        "depth": 4,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "out_hidden_size": 128,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2],
    }
    config = CohereCompassConfig(
        text_config=text.to_dict(),
        vision_config=vision,
        image_token_id=token_id("<|IMAGE_PAD|>"),
        video_token_id=token_id("<|VIDEO_PAD|>"),
        vision_start_token_id=token_id("<|VISION_START|>"),
        vision_end_token_id=token_id("<|VISION_END|>"),
        tie_word_embeddings=True,
    )
    size = {"shortest_edge": 16 * 32**2, "longest_edge": 256 * 32**2}
    processor = CohereCompassProcessor(
        CohereCompassImageProcessor(size=size, patch_size=16),
        tokenizer,
        CohereCompassVideoProcessor(size=size, patch_size=16),
    )
    return Checkpoint(
        CohereCompassForConditionalGeneration,
        config,
        processor,
        image="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        visual_tokens=(54, 234),
    )

# SPDX-License-Identifier: Apache-2.0
"""LFM2-VL: tiles of SigLIP 2, and a language model with convolutions."""

from transformers import (
    Lfm2Config,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    SIGLIP_ON_THE_HUB,
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)


def lfm2_vl() -> Checkpoint:
    tokenizer = make_tokenizer(
        [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)],
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail="<|img_thumbnail|>",
    )
    text = text_config(
        Lfm2Config,
        tokenizer,
        num_hidden_layers=3,
        layer_types=["full_attention", "conv", "full_attention"],
        block_dim=128,
        block_ff_dim=256,
        block_auto_adjust_ff_dim=False,
        conv_dim=128,
        conv_dim_out=128,
        tie_word_embeddings=True,  # vLLM's has no other
    )
    vision = {
        **TOWER,
        "model_type": "siglip2_vision_model",
        "num_patches": 64,
        "patch_size": 16,
        "vision_use_head": False,
    }
    config = Lfm2VlConfig(
        vision_config=vision,
        text_config=text.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projector_hidden_size=128,
        downsample_factor=2,
    )
    image_processor = Lfm2VlImageProcessor(
        tile_size=128,
        min_tiles=2,
        max_tiles=4,
        min_image_tokens=16,
        max_image_tokens=64,
        max_num_patches=256,
        encoder_patch_size=16,
        downsample_factor=2,
    )
    return Checkpoint(
        Lfm2VlForConditionalGeneration,
        config,
        Lfm2VlProcessor(image_processor, tokenizer),
        image="<image>",
        visual_tokens=(54, 118),
        hub_names=SIGLIP_ON_THE_HUB,
    )

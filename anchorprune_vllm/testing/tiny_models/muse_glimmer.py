# SPDX-License-Identifier: Apache-2.0
"""Muse Glimmer: a tower with windows, images of any size."""

from transformers import (
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    MuseGlimmerImageProcessor,
    MuseGlimmerProcessor,
    MuseGlimmerTextConfig,
    MuseGlimmerVideoProcessor,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)


def muse_glimmer() -> Checkpoint:
    tokenizer = make_tokenizer(
        [
            "<|image|>",
            "<|patch|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|video|>",
            "<|vid_start|>",
            "<|vid_end|>",
            "<|vid_frame_separator|>",
        ]
    )
    text = text_config(
        MuseGlimmerTextConfig, tokenizer, num_hidden_layers=4, head_dim=64, sliding_window=512
    )
    merged = 4 * TOWER["hidden_size"]  # of 2x2 patches
    vision = {
        **TOWER,
        "patch_size": 14,
        "pos_emb_height": 16,
        "pos_emb_width": 16,
        "max_position_embeddings": 16 * 16,
        # The same as outside the tower's configuration, under the names that vLLM reads.
        "output_dim": merged,
        "adapter_dim": merged,
    }
    config = MuseGlimmerConfig(
        text_config=text.to_dict(),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<|patch|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        out_hidden_size=merged,
        projector_hidden_size=merged,
    )
    processor = MuseGlimmerProcessor(
        MuseGlimmerImageProcessor(max_image_tokens=256), MuseGlimmerVideoProcessor(), tokenizer
    )
    return Checkpoint(
        MuseGlimmerForConditionalGeneration,
        config,
        processor,
        image="<|patch|>",
        visual_tokens=(77, 252),
    )

# SPDX-License-Identifier: Apache-2.0
"""Granite 4 Vision: crops as LLaVA-NeXT's, read by Q-Formers, with DeepStack."""

from transformers import (
    Granite4VisionConfig,
    Granite4VisionForConditionalGeneration,
    Granite4VisionProcessor,
    Granite4VisionTextConfig,
    LlavaNextImageProcessor,
    SiglipVisionConfig,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    SIGLIP_ON_THE_HUB,
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_TILE, _PATCH = 112, 14
_PINPOINTS = [[_TILE, 2 * _TILE], [2 * _TILE, _TILE], [2 * _TILE, 2 * _TILE]]
_CROPS = {
    "size": {"shortest_edge": _TILE},
    "crop_size": {"height": _TILE, "width": _TILE},
    "image_grid_pinpoints": _PINPOINTS,
}


def granite4_vision() -> Checkpoint:
    tokenizer = make_tokenizer(image_token="<image>")
    config = Granite4VisionConfig(
        vision_config=SiglipVisionConfig(
            **TOWER, image_size=_TILE, patch_size=_PATCH, vision_use_head=False
        ).to_dict(),
        text_config=text_config(
            Granite4VisionTextConfig, tokenizer, num_hidden_layers=4, attention_multiplier=0.125
        ).to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_select_strategy="full",
        downsample_rate="1/2",
        deepstack_layer_map=[(-2, 0), (-1, 1)],
        spatial_vision_layer=-1,
        spatial_target_layers=[2, 3],
    )
    processor = Granite4VisionProcessor(
        LlavaNextImageProcessor(**_CROPS),
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="full",
        downsample_rate="1/2",
    )
    return Checkpoint(
        Granite4VisionForConditionalGeneration,
        config,
        processor,
        image="<image>\n",
        visual_tokens=(70, 70),
        hub_names=SIGLIP_ON_THE_HUB,
    )

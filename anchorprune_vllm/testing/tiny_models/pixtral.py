# SPDX-License-Identifier: Apache-2.0
"""Models with Pixtral's tower, which takes images of many sizes."""

from dataclasses import replace

from anchorprune_vllm.testing.tiny_models.description import PATCH, TOWER, Config, TinyModel


def _tower(longest: int) -> Config:
    return TOWER | {"model_type": "pixtral", "image_size": longest, "patch_size": PATCH}


def _processors(longest: int, **options: int | str) -> dict[str, Config]:
    pixels = {"size": {"longest_edge": longest}, "patch_size": PATCH}
    return {
        "PixtralProcessor": {"patch_size": PATCH, **options},
        "PixtralImageProcessor": pixels,
    }


# fmt: off
PIXTRAL_MODELS: dict[str, TinyModel] = {}
PIXTRAL_MODELS["mistral3"] = TinyModel(
    architecture="Mistral3ForConditionalGeneration",
    tokens={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]"},
    text={"model_type": "mistral", "head_dim": 64},
    vision=_tower(336),
    config={"spatial_merge_size": 2, "vision_feature_layer": -1},
    processors=_processors(336, spatial_merge_size=2),
    visual_tokens=(88, 108),
)
PIXTRAL_MODELS["pixtral-hf"] = replace(
    PIXTRAL_MODELS["mistral3"], architecture="LlavaForConditionalGeneration",
    vision=_tower(168),
    config={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    processors=_processors(168),
    visual_tokens=(96, 108),
)
PIXTRAL_MODELS["pixtral"] = replace(
    PIXTRAL_MODELS["pixtral-hf"], architecture="PixtralForConditionalGeneration",
    model_class="LlavaForConditionalGeneration",
    text={"model_type": "mistral", "head_dim": 64, "max_position_embeddings": 4096},
    vision=_tower(252),
    visual_tokens=(216, 252),
    engine_arguments=dict.fromkeys(("tokenizer_mode", "config_format", "load_format"), "mistral"),
    file_format="mistral",
)
_TOKENS = {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>",
           "image_end_token": "<|vision_end|>"}
PIXTRAL_MODELS["lightonocr"] = replace(
    PIXTRAL_MODELS["mistral3"], architecture="LightOnOCRForConditionalGeneration",
    model_class="LightOnOcrForConditionalGeneration",
    tokens=_TOKENS,
    text={"model_type": "qwen3", "num_hidden_layers": 4, "head_dim": 64},
    processors=_processors(336, spatial_merge_size=2, **_TOKENS),
    hub_config="Mistral3Config",  # the older model's, which vLLM reads too
)

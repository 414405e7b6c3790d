# SPDX-License-Identifier: Apache-2.0
"""Models that see an image in tiles, and mostly the whole image too."""

from dataclasses import replace

from anchorprune_vllm.testing.tiny_models.description import (
    PATCH,
    SIGLIP,
    SIGLIP_ON_THE_HUB,
    TILE,
    TOWER,
    Config,
    TinyModel,
    square,
)

# fmt: off
TILED_MODELS: dict[str, TinyModel] = {}
_TOWER = TOWER | {"image_size": TILE, "patch_size": PATCH}
_TOKENS = (TILE // PATCH // 2) ** 2  # of a tile
_MAX_TILES = 6

# InternVL 3 and later, as transformers has it.
_TILES = {"GotOcr2ImageProcessor": {"size": square(TILE), "crop_to_patches": True,
                                    "min_patches": 1, "max_patches": _MAX_TILES}}
TILED_MODELS["internvl"] = TinyModel(
    architecture="InternVLForConditionalGeneration",
    tokens={"start_image_token": "<img>", "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
    text={"model_type": "qwen2"},
    vision=TOWER | {"image_size": [TILE, TILE], "patch_size": [PATCH, PATCH]},
    config={"image_token_id": "<IMG_CONTEXT>", "image_seq_length": _TOKENS,
            "downsample_ratio": 0.5},
    processors={"InternVLProcessor": {"image_seq_length": _TOKENS}, **_TILES,
                "InternVLVideoProcessor": {"size": square(TILE)}},
    image="<IMG_CONTEXT>\n", video="<video>\n", visual_tokens=(112, 112),
)
TILED_MODELS["intern-s1"] = replace(
    TILED_MODELS["internvl"], architecture="InternS1ForConditionalGeneration",
    model_class="InternVLForConditionalGeneration",
)

# InternVL's own format. The hub's configuration of InternVLChatModel comes with code of its own.
# Here LLaVA's stands in for it, as it keeps entries that it does not know; the weights are those of
# Qianfan-OCR, whose names in the hub's format transformers knows.
_HUB_TILES: Config = {
    "force_image_size": TILE, "downsample_ratio": 0.5, "dynamic_image_size": True,
    "min_dynamic_patch": 1, "max_dynamic_patch": _MAX_TILES, "use_thumbnail": True,
    "select_layer": -1,
}
_HUB_TOWER = {
    **TOWER, "model_type": "qianfan_ocr_vision", "image_size": TILE, "patch_size": PATCH,
    "qkv_bias": True, "qk_normalization": False, "norm_type": "layer_norm",
}
TILED_MODELS["qianfan-ocr"] = TinyModel(
    architecture="QianfanOCRForConditionalGeneration",
    tokens={"start_image_token": "<img>", "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>"},
    more_tokens=["<image>", "<video>", "<|video_pad|>"],
    text={"model_type": "qwen3", "head_dim": 64},
    vision=_TOWER,
    config={"image_token_id": "<IMG_CONTEXT>", "image_seq_length": _TOKENS},
    processors={"QianfanOCRProcessor": {"image_seq_length": _TOKENS}, **_TILES},
    image="<image>\n", visual_tokens=(112, 112),
    hub_names={"language_model.model.encoder.": "language_model.model."},
    config_json={"vision_config": _HUB_TOWER, **_HUB_TILES,
                 "ps_version": "v2", "template": "internvl2_5"},
)
TILED_MODELS["skywork-r1v"] = replace(
    TILED_MODELS["qianfan-ocr"], architecture="SkyworkR1VChatModel",
    model_class="QianfanOCRForConditionalGeneration",
    config_json=TILED_MODELS["qianfan-ocr"].config_json | {
        "model_type": "llava",
        "vision_config": _HUB_TOWER | {
            "model_type": "clip_vision_model", "hidden_act": "gelu", "layer_norm_eps": 1e-6,
        },
    },
)
TILED_MODELS["internvl-chat"] = replace(
    TILED_MODELS["skywork-r1v"], architecture="InternVLChatModel", video="<video>\n"
)
# It may cut an image into tiles twice, and here does not: with `use_msac`, an image has more tiles
# alone in its prompt than among others, and vLLM's encoder cache takes the one for the other.
TILED_MODELS["h2ovl"] = replace(
    TILED_MODELS["skywork-r1v"], architecture="H2OVLChatModel",
    config_json=TILED_MODELS["skywork-r1v"].config_json | {"use_msac": False},
)
TILED_MODELS["eagle2.5"] = replace(
    TILED_MODELS["qianfan-ocr"], architecture="Eagle2_5_VLForConditionalGeneration",
    more_tokens=["<image>"],
    text={"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    vision=SIGLIP,
    config={"image_token_id": "<IMG_CONTEXT>"},
    hub_names={
        f"vision_model.{part}.": f"vision_model.vision_model.{part}."
        for part in ("embeddings", "encoder", "post_layernorm")
    },
    config_json=_HUB_TILES,
)

# Tiles in rows and columns.
_PIXELS: Config = {"size": {"longest_edge": 3 * TILE}, "max_image_size": {"longest_edge": TILE}}
TILED_MODELS["idefics3"] = TinyModel(
    architecture="Idefics3ForConditionalGeneration",
    tokens={"image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"},
    more_tokens=[f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
    text={"model_type": "llama"},
    vision=_TOWER,
    config={"scale_factor": 2, "pad_token_id": "<|endoftext|>"},
    processors={"Idefics3Processor": {"image_seq_len": _TOKENS},
                "Idefics3ImageProcessor": _PIXELS | {"do_image_splitting": True}},
    visual_tokens=(112, 160),
)
TILED_MODELS["smolvlm"] = replace(
    TILED_MODELS["idefics3"], architecture="SmolVLMForConditionalGeneration",
    processors={"SmolVLMProcessor": {"image_seq_len": _TOKENS},
                "SmolVLMImageProcessor": _PIXELS | {"do_image_splitting": True},
                "SmolVLMVideoProcessor": _PIXELS | {"size": {"longest_edge": TILE}}},
)

TILED_MODELS["llama4"] = TinyModel(
    architecture="Llama4ForConditionalGeneration",
    tokens={"image_token": "<|image|>"},
    more_tokens=["<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
                 "<|tile_y_separator|>"],
    text={"head_dim": 64, "intermediate_size_mlp": 256, "num_local_experts": 2},
    vision=_TOWER | {
        "intermediate_size": 256,  # Pixel shuffling wants four times the tower's width.
        "vision_output_dim": 128, "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 128, "projector_output_dim": 128,
    },
    config={"image_token_id": "<|patch|>", "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>"},
    processors={
        "Llama4Processor": {"patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
        "Llama4ImageProcessor": {"size": square(TILE), "max_patches": _MAX_TILES,
                                 "resize_to_max_canvas": False},
    },
    visual_tokens=(112, 112),
)

# Tiles of SigLIP 2, and a language model with convolutions.
TILED_MODELS["lfm2-vl"] = TinyModel(
    architecture="Lfm2VlForConditionalGeneration",
    tokens={"image_token": "<image>", "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>", "image_thumbnail": "<|img_thumbnail|>"},
    more_tokens=[
        f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)
    ],
    text={"model_type": "lfm2", "num_hidden_layers": 3,
          "layer_types": ["full_attention", "conv", "full_attention"],
          "block_dim": 128, "block_ff_dim": 256, "block_auto_adjust_ff_dim": False,
          "conv_dim": 128, "conv_dim_out": 128,
          "tie_word_embeddings": True},  # vLLM's has no other
    vision=TOWER | {"model_type": "siglip2_vision_model", "num_patches": 64, "patch_size": 16,
                    "vision_use_head": False},
    config={"projector_hidden_size": 128, "downsample_factor": 2},
    processors={
        "Lfm2VlProcessor": {},
        "Lfm2VlImageProcessor": {
            "tile_size": 128, "min_tiles": 2, "max_tiles": 4,
            "min_image_tokens": 16, "max_image_tokens": 64, "max_num_patches": 256,
            "encoder_patch_size": 16, "downsample_factor": 2,
        },
    },
    visual_tokens=(54, 118), hub_names=SIGLIP_ON_THE_HUB,
)
TILED_MODELS["cohere2-vision"] = TinyModel(
    architecture="Cohere2VisionForConditionalGeneration",
    tokens={"image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>", "img_line_break_token": "<|IMG_LINE_BREAK|>"},
    text={"model_type": "cohere2", "logit_scale": 1.0,
          "tie_word_embeddings": True},  # vLLM's has no other
    vision=SIGLIP,
    config={"downsample_factor": 2, "alignment_intermediate_size": 256},
    processors={
        "Cohere2VisionProcessor": {},
        "Cohere2VisionImageProcessor": {"size": square(TILE), "max_patches": _MAX_TILES,
                                        "patch_size": 4},
    },
    visual_tokens=(112, 112), hub_names=SIGLIP_ON_THE_HUB,
)

# LLaVA-NeXT's crops. R-4B and Bee: LLaVA-OneVision with another projector, for images alone.
_PINPOINTS = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
_CROPS = {"LlavaNextImageProcessor": {"size": {"shortest_edge": TILE}, "crop_size": square(TILE),
                                      "image_grid_pinpoints": _PINPOINTS}}
_WHOLE: Config = {"vision_feature_select_strategy": "full"}
TILED_MODELS["r-vl"] = TinyModel(
    architecture="RForConditionalGeneration",
    tokens={"image_token": "<image>"},
    text={"model_type": "qwen3", "head_dim": 64},
    vision=SIGLIP,
    config={**_WHOLE, "image_grid_pinpoints": _PINPOINTS, "vision_feature_layer": -1},
    processors={"LlavaNextProcessor": {"patch_size": PATCH, **_WHOLE}, **_CROPS},
    image="<image>\n", visual_tokens=(234, 268),
    hub_names={**SIGLIP_ON_THE_HUB, "language_model.model.": "language_model."},
)
TILED_MODELS["bee"] = replace(TILED_MODELS["r-vl"], architecture="BeeForConditionalGeneration")
# Q-Formers read the crops, with DeepStack.
TILED_MODELS["granite4-vision"] = replace(
    TILED_MODELS["r-vl"], architecture="Granite4VisionForConditionalGeneration",
    text={"model_type": "granite4_vision_text", "num_hidden_layers": 4,
          "attention_multiplier": 0.125},
    config={**_WHOLE, "image_grid_pinpoints": _PINPOINTS, "downsample_rate": "1/2",
            "deepstack_layer_map": [(-2, 0), (-1, 1)], "spatial_vision_layer": -1,
            "spatial_target_layers": [2, 3]},
    processors={
        "Granite4VisionProcessor": {"patch_size": PATCH, **_WHOLE, "downsample_rate": "1/2"},
        **_CROPS,
    },
    visual_tokens=(70, 70), hub_names=SIGLIP_ON_THE_HUB,
)

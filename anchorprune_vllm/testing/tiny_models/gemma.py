# SPDX-License-Identifier: Apache-2.0
"""PaliGemma, Gemma 3, Gemma 4 and its form without a tower."""

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
GEMMA_MODELS: dict[str, TinyModel] = {}
# It puts images before the text.
GEMMA_MODELS["paligemma"] = TinyModel(
    architecture="PaliGemmaForConditionalGeneration",
    tokens={"image_token": "<image>"},
    words=["\n"],
    bos="<bos>",
    text={"model_type": "gemma", "head_dim": 64},
    vision=SIGLIP | {"projection_dim": 128},
    config={"projection_dim": 128},
    processors={
        "PaliGemmaProcessor": {},
        "SiglipImageProcessor": {"size": square(TILE), "image_seq_length": (TILE // PATCH) ** 2},
    },
    visual_tokens=(64, 64), max_images=1, hub_names=SIGLIP_ON_THE_HUB,
)
GEMMA_MODELS["gemma3"] = TinyModel(
    architecture="Gemma3ForConditionalGeneration",
    tokens={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>"},
    words=["\n" * count for count in range(1, 5)],  # vLLM looks for them next to an image.
    bos="<bos>",
    # The scalar makes attention sharp; else images and questions hardly count.
    text={"head_dim": 64, "query_pre_attn_scalar": 2, "sliding_window": 512},
    vision=SIGLIP | {"image_size": 224},
    config={"mm_tokens_per_image": 64},
    processors={"Gemma3Processor": {"image_seq_length": 64},
                "Gemma3ImageProcessor": {"size": square(224)}},
    image="<start_of_image>", visual_tokens=(64, 64), hub_names=SIGLIP_ON_THE_HUB,
)

_GEMMA4_TOKENS = 70  # the fewest that its processor allows
_GEMMA4_TEXT: Config = {
    "head_dim": 64, "global_head_dim": 64, "num_global_key_value_heads": 2,
    "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA_MODELS["gemma4"] = TinyModel(
    architecture="Gemma4ForConditionalGeneration",
    tokens={"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
            "video_token": "<|video|>",
            "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    bos="<bos>",
    text=_GEMMA4_TEXT | {
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 832,  # not less than the vocabulary
    },
    vision=TOWER | {
        "num_key_value_heads": 2, "head_dim": 32, "patch_size": 16,
        "position_embedding_size": 256, "pooling_kernel_size": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "default_output_length": _GEMMA4_TOKENS,
    },
    config={"audio_config": None, "eoa_token_index": "<audio|>"},
    processors={"Gemma4Processor": {"image_seq_length": _GEMMA4_TOKENS},
                "Gemma4ImageProcessor": {"max_soft_tokens": _GEMMA4_TOKENS},
                "Gemma4VideoProcessor": {},
                "Gemma4AudioFeatureExtractor": {}},
    video="<|video|>", visual_tokens=(60, 63),
)
# It has no tower: patches become rows one by one.
GEMMA_MODELS["gemma4-unified"] = replace(
    GEMMA_MODELS["gemma4"], architecture="Gemma4UnifiedForConditionalGeneration",
    text=_GEMMA4_TEXT,
    vision={"patch_size": 16, "pooling_kernel_size": 3, "model_patch_size": 48,
            "mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64,
            "num_soft_tokens": _GEMMA4_TOKENS},
    processors={
        name.replace("Gemma4", "Gemma4Unified"): options
        for name, options in GEMMA_MODELS["gemma4"].processors.items()
    },
)

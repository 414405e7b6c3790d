# SPDX-License-Identifier: Apache-2.0
"""Models without relatives: Aria, BLIP-2, PaddleOCR-VL and Muse Glimmer."""

from anchorprune_vllm.testing.tiny_models.description import (
    PATCH,
    TILE,
    TOWER,
    TinyModel,
    pixel_limits,
    square,
)

# fmt: off
OTHER_MODELS: dict[str, TinyModel] = {}
# Its projector has a fixed number of queries. The processor takes this size, or half of it.
_ARIA_SIZE, _ARIA_PATCH = 980, 70
OTHER_MODELS["aria"] = TinyModel(
    architecture="AriaForConditionalGeneration",
    tokens={"image_token": "<|img|>"},
    text={"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2,
          "moe_num_shared_experts": 1},
    vision=TOWER | {"model_type": "idefics3_vision", "image_size": _ARIA_SIZE,
                    "patch_size": _ARIA_PATCH},
    config={"projector_patch_to_query_dict": {(_ARIA_SIZE // _ARIA_PATCH) ** 2: 64}},
    processors={
        "AriaProcessor": {"size_conversion": {_ARIA_SIZE: 64}},
        "AriaImageProcessor": {"max_image_size": _ARIA_SIZE, "min_image_size": _ARIA_SIZE // 4},
    },
    visual_tokens=(64, 64),
)

# Its Q-Former has a fixed number of queries.
OTHER_MODELS["blip2"] = TinyModel(
    architecture="Blip2ForConditionalGeneration",
    more_tokens=["<image>"],
    text={"model_type": "opt", "ffn_dim": 256, "word_embed_proj_dim": 128,
          "max_position_embeddings": 2048, "tie_word_embeddings": True},
    vision=TOWER | {"image_size": TILE, "patch_size": PATCH},
    config={
        "qformer_config": {**TOWER, "encoder_hidden_size": TOWER["hidden_size"],
                           "vocab_size": 100},
        "num_query_tokens": 32, "image_token_id": "<image>",
    },
    processors={"Blip2Processor": {"num_query_tokens": 32},
                "BlipImageProcessor": {"size": square(TILE)}},
    image="",  # Its processor puts the image before all text.
    visual_tokens=(32, 32), max_images=1,
)

OTHER_MODELS["paddleocr-vl"] = TinyModel(
    architecture="PaddleOCRVLForConditionalGeneration",
    tokens={"image_token": "<|IMAGE_PLACEHOLDER|>", "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>"},
    more_tokens=["<|video_pad|>"],
    text={"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5,
                                              "mrope_section": [11, 11, 10]}},
    vision=TOWER | {"image_size": TILE, "patch_size": PATCH},
    config={"video_token_id": "<|video_pad|>", "vision_start_token_id": "<|IMAGE_START|>",
            "vision_end_token_id": "<|IMAGE_END|>"},
    processors={"PaddleOCRVLProcessor": {},
                "PaddleOCRVLImageProcessor": {"size": pixel_limits(PATCH)["size"]}},
    image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", visual_tokens=(77, 234),
)

# Its tower has windows, and takes images of any size.
_MERGED = 4 * TOWER["hidden_size"]  # the width of 2x2 patches side by side
OTHER_MODELS["muse-glimmer"] = TinyModel(
    architecture="MuseGlimmerForConditionalGeneration",
    more_tokens=["<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>",
                 "<|vid_start|>", "<|vid_end|>", "<|vid_frame_separator|>"],
    text={"num_hidden_layers": 4, "head_dim": 64, "sliding_window": 512},
    vision=TOWER | {
        "patch_size": PATCH, "pos_emb_height": 16, "pos_emb_width": 16,
        "max_position_embeddings": 16 * 16,
        # The widths of `config`, under the names that vLLM reads.
        "output_dim": _MERGED, "adapter_dim": _MERGED,
    },
    config={"image_token_id": "<|patch|>", "video_token_id": "<|video|>",
            "out_hidden_size": _MERGED, "projector_hidden_size": _MERGED},
    processors={"MuseGlimmerProcessor": {},
                "MuseGlimmerImageProcessor": {"max_image_tokens": 256},
                "MuseGlimmerVideoProcessor": {}},
    image="<|patch|>", visual_tokens=(77, 252),
)

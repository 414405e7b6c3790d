# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL to Qwen3.5, Qwen's omni models, and models built on them."""

from dataclasses import replace

from anchorprune_vllm.testing.tiny_models.description import (
    MERGING_TOWER,
    PATCH,
    TOWER,
    Config,
    TinyModel,
    pixel_limits,
)

# fmt: off
QWEN_MODELS: dict[str, TinyModel] = {}
_ROPE: Config = {"rope_type": "default", "rope_theta": 1e6}
_MROPE = _ROPE | {"mrope_section": [8, 12, 12]}
_INTERLEAVED_MROPE = _ROPE | {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
_WINDOWED_TOWER = MERGING_TOWER | {"window_size": 112, "fullatt_block_indexes": [1]}
_QWEN3_TOWER = MERGING_TOWER | {"depth": 4, "patch_size": 16, "num_position_embeddings": 256}
_DEEPSTACK_TOWER = _QWEN3_TOWER | {"deepstack_visual_indexes": [1, 2]}
_DEEPSTACK = {
    "num_hidden_layers": 4,  # more than the layers of the tower that are added to them
    "head_dim": 64, "rope_parameters": _INTERLEAVED_MROPE,
}
_LINEAR_ATTENTION = {
    "num_hidden_layers": 4, "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "rope_parameters": _INTERLEAVED_MROPE | {"partial_rotary_factor": 1.0},
}
_BFLOAT16 = {"dtype": "bfloat16"}  # vLLM's linear attention has no other precision on a CPU.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
_NORMED_EXPERTS = _EXPERTS | {"norm_topk_prob": True}
_SLIDING = ["sliding_attention", "full_attention"]
_HALF = [0.5] * 3


def _processors(name: str, patch: int = PATCH) -> dict[str, Config]:
    limits = pixel_limits(patch)
    return {name: {}, "Qwen2VLImageProcessor": limits, "Qwen2VLVideoProcessor": limits}


QWEN_MODELS["qwen2-vl"] = TinyModel(
    architecture="Qwen2VLForConditionalGeneration",
    tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"},
    more_tokens=["<|vision_pad|>"],
    text={"rope_parameters": _MROPE},
    vision={"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": PATCH},
    config={"vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>"},
    processors=_processors("Qwen2VLProcessor"),
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>", visual_tokens=(77, 234),
)
# A question changes its probabilities, but seldom the words of an answer.
QWEN_MODELS["exaone4.5"] = replace(
    QWEN_MODELS["qwen2-vl"], architecture="Exaone4_5_ForConditionalGeneration",
    text={"num_hidden_layers": 4, "layer_types": _SLIDING * 2, "sliding_window": 512,
          "head_dim": 64, "rope_parameters": _ROPE},
    vision=_WINDOWED_TOWER | {"num_key_value_heads": 1},
    processors=_processors("Exaone4_5_Processor"),
)
# Qwen2.5-VL's tower before a Qwen2, which has ordinary rotary embeddings.
QWEN_MODELS["opencua"] = TinyModel(
    architecture="OpenCUAForConditionalGeneration",
    model_class="Qwen2_5_VLForConditionalGeneration",
    tokens={"image_token": "<|media_placeholder|>"},
    text={"rope_parameters": _ROPE},
    vision=_WINDOWED_TOWER,
    processors=_processors("Qwen2VLProcessor"),
    visual_tokens=(77, 234),
)

QWEN_MODELS["qwen3-vl"] = replace(
    QWEN_MODELS["qwen2-vl"], architecture="Qwen3VLForConditionalGeneration",
    text=_DEEPSTACK,
    vision=_DEEPSTACK_TOWER,
    processors={
        "Qwen3VLProcessor": {},
        # The same mean and deviation as for videos: vLLM normalises those like images.
        "Qwen2VLImageProcessor": pixel_limits(16) | {"image_mean": _HALF, "image_std": _HALF},
        "Qwen3VLVideoProcessor": pixel_limits(16),
    },
    visual_tokens=(54, 234),
)
QWEN_MODELS["qwen3-vl-moe"] = replace(
    QWEN_MODELS["qwen3-vl"], architecture="Qwen3VLMoeForConditionalGeneration",
    text=_DEEPSTACK | _NORMED_EXPERTS,
    transposed_on_hub=["mlp.experts."],
)
QWEN_MODELS["qwen3.5"] = replace(
    QWEN_MODELS["qwen3-vl"], architecture="Qwen3_5ForConditionalGeneration",
    text=_LINEAR_ATTENTION,
    vision=_QWEN3_TOWER,
    engine_arguments=_BFLOAT16,
)
QWEN_MODELS["qwen3.5-moe"] = replace(
    QWEN_MODELS["qwen3.5"], architecture="Qwen3_5MoeForConditionalGeneration",
    text=_LINEAR_ATTENTION | _EXPERTS | {"shared_expert_intermediate_size": 128},
)
# Qwen3.5 with experts under another name; its reader of time series is left out.
QWEN_MODELS["interns2-preview"] = replace(
    QWEN_MODELS["qwen3.5-moe"], architecture="InternS2PreviewForConditionalGeneration",
    model_class="Qwen3_5MoeForConditionalGeneration",
)

# Of the omni models, the part that sees, hears and answers in text.
_AUDIO = {"num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 2,
          "encoder_ffn_dim": 128, "d_model": 64, "output_dim": 128}
_OMNI_IDS = {"audio_start_token_id": "<|audio_bos|>", "vision_start_token_id": "<|vision_bos|>",
             "vision_end_token_id": "<|vision_eos|>"}
_WHISPER = {"WhisperFeatureExtractor": {"feature_size": 128}}
_THINKER_PARTS = ("model.", "visual.", "audio_tower.", "lm_head.")
QWEN_MODELS["qwen2.5-omni"] = TinyModel(
    architecture="Qwen2_5OmniModel",
    model_class="Qwen2_5OmniThinkerForConditionalGeneration",
    tokens={"image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
            "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
    text={"rope_parameters": _MROPE},
    vision=_WINDOWED_TOWER,
    config={**_OMNI_IDS, "audio_end_token_id": "<|audio_eos|>", "audio_config": _AUDIO},
    processors=_processors("Qwen2_5OmniProcessor") | _WHISPER,
    image="<|vision_bos|><|IMAGE|><|vision_eos|>", video="<|vision_bos|><|VIDEO|><|vision_eos|>",
    visual_tokens=(77, 234),
    hub_config="Qwen2_5OmniConfig",
    hub_names={part: f"thinker.{part}" for part in _THINKER_PARTS},
)
QWEN_MODELS["qwen2.5-omni-generation"] = replace(
    QWEN_MODELS["qwen2.5-omni"], architecture="Qwen2_5OmniForConditionalGeneration"
)
QWEN_MODELS["qwen3-omni-moe"] = replace(
    QWEN_MODELS["qwen2.5-omni"], architecture="Qwen3OmniMoeForConditionalGeneration",
    model_class="Qwen3OmniMoeThinkerForConditionalGeneration",
    text=_DEEPSTACK | _NORMED_EXPERTS,
    vision=_DEEPSTACK_TOWER | {"image_size": 256},
    config=_OMNI_IDS | {"audio_config": _AUDIO | {"downsample_hidden_size": 16}},
    processors=_processors("Qwen3OmniMoeProcessor", 16) | _WHISPER,
    visual_tokens=(54, 234),
    hub_config="Qwen3OmniMoeConfig",
)

# An image and its slices, on Qwen3.5's language model.
_SLICES = {"scale_resolution": 224, "patch_size": PATCH, "max_slice_nums": 4}
_SLICE_PROCESSORS = dict.fromkeys(
    ["MiniCPMV4_6ImageProcessor", "MiniCPMV4_6VideoProcessor"], _SLICES
)
QWEN_MODELS["minicpm-v-4.6"] = TinyModel(
    architecture="MiniCPMV4_6ForConditionalGeneration",
    tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
            "image_start_token": "<image>", "image_end_token": "</image>",
            "slice_start_token": "<slice>", "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
    words=["\n"],
    # Full attention comes first: what linear attention has forgotten, it cannot find.
    text=_LINEAR_ATTENTION | {"model_type": "qwen3_5_text",
                              "layer_types": ["full_attention", "linear_attention"] * 2},
    vision=TOWER | {"image_size": 224, "patch_size": PATCH},
    config={"insert_layer_id": 0, "image_size": 224},
    processors={"MiniCPMV4_6Processor": {}, **_SLICE_PROCESSORS},
    image="<|image_pad|>\n", video="<|video_pad|>\n",
    visual_tokens=(45, 75), engine_arguments=_BFLOAT16,
)
# Slices have places on a canvas, by the tokens around them.
QWEN_MODELS["minicpm-v-4.7"] = replace(
    QWEN_MODELS["minicpm-v-4.6"], architecture="MiniCPMV4_7ForConditionalGeneration",
    config={**QWEN_MODELS["minicpm-v-4.6"].config, "newline_id": "\n",
            "image_start_id": "<image>", "image_end_id": "</image>",
            "slice_start_id": "<slice>", "slice_end_id": "</slice>"},
    processors={"MiniCPMV4_7Processor": {}, **_SLICE_PROCESSORS},
)

QWEN_MODELS["cohere-compass"] = TinyModel(
    architecture="CohereCompassForConditionalGeneration",
    tokens={"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>",
            "vision_start_token": "<|VISION_START|>", "vision_end_token": "<|VISION_END|>"},
    text={"num_hidden_layers": 4, "layer_types": _SLIDING * 2, "sliding_window": 512,
          "rope_parameters": dict.fromkeys(_SLIDING, _INTERLEAVED_MROPE),
          "logit_scale": 1.0, "tie_word_embeddings": True},
    vision=_DEEPSTACK_TOWER,
    processors={"CohereCompassProcessor": {},
                "CohereCompassImageProcessor": pixel_limits(16),
                "CohereCompassVideoProcessor": pixel_limits(16)},
    image="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>", visual_tokens=(54, 234),
)

# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V and its relatives."""

from dataclasses import replace

from anchorprune_vllm.testing.tiny_models.description import MERGING_TOWER, Config, TinyModel

# fmt: off
GLM_MODELS: dict[str, TinyModel] = {}
_PIXELS = {"size": {"shortest_edge": 112**2, "longest_edge": 2 * 448**2}, "patch_size": 14,
           "merge_size": 2, "temporal_patch_size": 2}
_ROPE: Config = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6],
                 "partial_rotary_factor": 0.5}
_EDGES = {
    f"{kind}_{edge}_token_id": f"<|{word}_of_{kind}|>"
    for kind in ("image", "video")
    for edge, word in (("start", "begin"), ("end", "end"))
}

GLM_MODELS["glm-4v"] = TinyModel(
    architecture="Glm4vForConditionalGeneration",
    tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    more_tokens=["[gMASK]", "<sop>", *_EDGES.values()],
    # transformers' class has the biases in any case; vLLM's has to be told, as on the hub.
    text={"rope_parameters": _ROPE, "attention_bias": True},
    vision=MERGING_TOWER | {"image_size": 336},
    config=_EDGES,
    processors={"Glm4vProcessor": {}, "Glm4vImageProcessor": _PIXELS,
                "Glm4vVideoProcessor": _PIXELS},
    image="<|begin_of_image|><|image|><|end_of_image|>",
    video="<|begin_of_video|><|video|><|end_of_video|>", visual_tokens=(77, 234),
)
GLM_MODELS["glm-4v-moe"] = replace(
    GLM_MODELS["glm-4v"], architecture="Glm4vMoeForConditionalGeneration",
    text={"head_dim": 64, "rope_parameters": _ROPE, "n_routed_experts": 4,
          "num_experts_per_tok": 2, "moe_intermediate_size": 192, "use_qk_norm": False},
)
GLM_MODELS["glm-ocr"] = replace(
    GLM_MODELS["glm-4v"], architecture="GlmOcrForConditionalGeneration",
    text={"head_dim": 64, "rope_parameters": _ROPE | {"mrope_section": [8, 12, 12],
                                                      "partial_rotary_factor": 1.0}},
)

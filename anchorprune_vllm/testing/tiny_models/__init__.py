# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights of many model families, in the hub's file format.

Each file describes models that are alike, as data; `checkpoint.py` writes what they describe.
"""

from __future__ import annotations

from anchorprune_vllm.testing.tiny_models import gemma, glm, other, pixtral, qwen, tiles
from anchorprune_vllm.testing.tiny_models.description import TinyModel

TINY_MODELS: dict[str, TinyModel] = {
    "qwen3-vl": qwen.QWEN3_VL,
    "qwen2-vl": qwen.QWEN2_VL,
    "internvl": tiles.INTERNVL,
    "gemma3": gemma.GEMMA3,
    "glm-4v": glm.GLM4V,
    "mistral3": pixtral.MISTRAL3,
    "idefics3": tiles.IDEFICS3,
    "smolvlm": tiles.SMOLVLM,
    "llama4": tiles.LLAMA4,
    "qwen3.5": qwen.QWEN3_5,
    "qwen3-vl-moe": qwen.QWEN3_VL_MOE,
    "qwen3.5-moe": qwen.QWEN3_5_MOE,
    "gemma4": gemma.GEMMA4,
    "pixtral": pixtral.PIXTRAL,
    "pixtral-hf": pixtral.PIXTRAL_HF,
    "internvl-chat": tiles.INTERNVL_CHAT,
    "qianfan-ocr": tiles.QIANFAN_OCR,
    "lfm2-vl": tiles.LFM2_VL,
    "cohere2-vision": tiles.COHERE2_VISION,
    "paligemma": gemma.PALIGEMMA,
    "lightonocr": pixtral.LIGHTON_OCR,
    "aria": other.ARIA,
    "blip2": other.BLIP2,
    "granite4-vision": tiles.GRANITE4_VISION,
    "glm-4v-moe": glm.GLM4V_MOE,
    "glm-ocr": glm.GLM_OCR,
    "minicpm-v-4.6": qwen.MINICPM_V_4_6,
    "paddleocr-vl": other.PADDLE_OCR_VL,
    "exaone4.5": qwen.EXAONE4_5,
    "cohere-compass": qwen.COHERE_COMPASS,
    "muse-glimmer": other.MUSE_GLIMMER,
    "intern-s1": tiles.INTERN_S1,
    "skywork-r1v": tiles.SKYWORK_R1V,
    "qwen2.5-omni": qwen.QWEN2_5_OMNI,
    "qwen2.5-omni-generation": qwen.QWEN2_5_OMNI_GENERATION,
    "qwen3-omni-moe": qwen.QWEN3_OMNI_MOE,
    "minicpm-v-4.7": qwen.MINICPM_V_4_7,
    "h2ovl": tiles.H2OVL,
    "interns2-preview": qwen.INTERNS2_PREVIEW,
    "opencua": qwen.OPENCUA,
    "r-vl": tiles.R_VL,
    "bee": tiles.BEE,
    "gemma4-unified": gemma.GEMMA4_UNIFIED,
    "eagle2.5": tiles.EAGLE2_5,
}
FAMILIES = TINY_MODELS

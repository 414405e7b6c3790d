# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights of many model families, in the hub's file format.

One file describes a family, or a few that are alike; `checkpoint.py` writes what they describe.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FAMILIES = {
    "qwen3-vl": "qwen_vl:qwen3_vl",
    "qwen2-vl": "qwen_vl:qwen2_vl",
    "internvl": "internvl:internvl",
    "gemma3": "gemma:gemma3",
    "glm-4v": "glm:glm4v",
    "mistral3": "pixtral_tower:mistral3",
    "idefics3": "idefics:idefics3",
    "smolvlm": "idefics:smolvlm",
    "llama4": "llama4:llama4",
    "qwen3.5": "qwen_vl:qwen3_5",
    "qwen3-vl-moe": "qwen_vl:qwen3_vl_moe",
    "qwen3.5-moe": "qwen_vl:qwen3_5_moe",
    "gemma4": "gemma:gemma4",
    "pixtral": "pixtral:pixtral",
    "pixtral-hf": "pixtral_tower:pixtral_hf",
    "internvl-chat": "internvl_chat:internvl_chat",
    "qianfan-ocr": "internvl_chat:qianfan_ocr",
    "lfm2-vl": "lfm2_vl:lfm2_vl",
    "cohere2-vision": "cohere:cohere2_vision",
    "paligemma": "paligemma:paligemma",
    "lightonocr": "pixtral_tower:lighton_ocr",
    "aria": "aria:aria",
    "blip2": "blip2:blip2",
    "granite4-vision": "granite_vision:granite4_vision",
    "glm-4v-moe": "glm:glm4v_moe",
    "glm-ocr": "glm:glm_ocr",
    "minicpm-v-4.6": "minicpm_v:minicpm_v_4_6",
    "paddleocr-vl": "paddle_ocr:paddle_ocr_vl",
    "exaone4.5": "qwen_vl:exaone4_5",
    "cohere-compass": "cohere:cohere_compass",
    "muse-glimmer": "muse_glimmer:muse_glimmer",
    "intern-s1": "internvl:intern_s1",
    "skywork-r1v": "internvl_chat:skywork_r1v",
    "qwen2.5-omni": "qwen_omni:qwen2_5_omni",
    "qwen2.5-omni-generation": "qwen_omni:qwen2_5_omni_generation",
    "qwen3-omni-moe": "qwen_omni:qwen3_omni_moe",
    "minicpm-v-4.7": "minicpm_v:minicpm_v_4_7",
    "h2ovl": "internvl_chat:h2ovl",
    "interns2-preview": "qwen_vl:interns2_preview",
    "opencua": "qwen_vl:opencua",
    "r-vl": "onevision_like:r_vl",
    "bee": "onevision_like:bee",
    "gemma4-unified": "gemma:gemma4_unified",
    "eagle2.5": "eagle:eagle2_5",
}
"""Name of a family → the module of this package and the function in it that describe its model."""

_FOLDERS = "vLLM reads its weights from the folders of a diffusion pipeline alone"
_GPU = "vLLM has it for GPUs alone (its folders nvidia and amd)"
_OTHER_CONFIG = "vLLM reads the configuration of the hub's own code, which transformers has changed"
NOT_MADE = {
    "Cosmos3EdgeForConditionalGeneration": _FOLDERS,
    "Cosmos3ForConditionalGeneration": _FOLDERS,
    "Ernie4_5_VLMoeForConditionalGeneration": f"{_OTHER_CONFIG} (im_patch_id)",
    "Gemma3nForConditionalGeneration": "its tower is one of the package timm, which vLLM does not "
    "bring",
    "Glm5NextForConditionalGeneration": _GPU,
    "LlavaNextVideoForConditionalGeneration": "it sees videos alone, and a trial begins with "
    "images",
    "MiniMaxM3SparseForConditionalGeneration": _GPU,
    "Qwen4ExpForConditionalGeneration": _GPU,
    "Step3p7ForConditionalGeneration": f"{_OTHER_CONFIG} (width)",
}
"""Architecture → why there is no tiny checkpoint of it, where one was looked into."""


class TinyModel(Protocol):
    """The description of a family's tiny model."""

    @property
    def architecture_name(self) -> str:
        """Return its name in vLLM's registry."""

    @property
    def visual_tokens(self) -> tuple[int, int]:
        """Return the numbers for an image of 300x200 pixels, and for one of 1200x900."""

    @property
    def engine_arguments(self) -> Mapping[str, str]:
        """Return what vLLM must be told to serve it on a CPU."""

    def write(self, directory: Path, seed: int) -> None:
        """Write the files that the hub would have; the same seed gives the same bytes."""


def describe_family(name: str) -> TinyModel:
    """Return the description of the tiny model of one of `FAMILIES`.

    Raises ValueError if a package that its processor needs is not installed.
    """
    module, function = FAMILIES[name].split(":")
    try:
        # Only now: importing transformers takes seconds.
        model: TinyModel = getattr(import_module(f"{__name__}.{module}"), function)()
    except ImportError as error:
        raise ValueError(f"{name}: {error}") from error
    return model

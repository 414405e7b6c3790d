# SPDX-License-Identifier: Apache-2.0
"""Models that can be pruned: one file per architecture, each a subclass of vLLM's own class."""

from importlib import import_module
from typing import Any

ARCHITECTURES = {
    "LlavaForConditionalGeneration": "anchorprune_vllm.models.llava:PrunedLlava",
    "LlavaNextForConditionalGeneration": "anchorprune_vllm.models.llava_next:PrunedLlavaNext",
    "LlavaOnevisionForConditionalGeneration": (
        "anchorprune_vllm.models.llava_onevision:PrunedOnevision"
    ),
    "LlavaQwenForCausalLM": "anchorprune_vllm.models.llava_video:PrunedLlavaVideo",
    "Qwen2_5_VLForConditionalGeneration": "anchorprune_vllm.models.qwen2_5_vl:PrunedQwen",
}
"""vLLM's architecture name -> "module:class": strings, so that nothing is imported early."""


def model_class(architecture: str) -> Any:
    """The class of ours that serves one of `ARCHITECTURES`."""
    module, name = ARCHITECTURES[architecture].split(":")
    return getattr(import_module(module), name)

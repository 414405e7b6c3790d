# SPDX-License-Identifier: Apache-2.0
"""AnchorPrune from the paper's equations, on transformers in eager mode.

Shares no code with the plugin: attention matrices are dense, layouts and positions are
transformers' own, selection is plain numpy in float64.
"""

import json
from pathlib import Path

from tests.support.reference.base import Reference
from tests.support.reference.glm import ReferenceGlm
from tests.support.reference.internvl import ReferenceInternVL, ReferenceInternVLChat
from tests.support.reference.llava import ReferenceLlava, ReferenceLlavaNext
from tests.support.reference.llava_video import ReferenceLlavaVideo
from tests.support.reference.onevision import ReferenceOnevision
from tests.support.reference.pixtral import ReferenceMistral3, ReferencePixtral
from tests.support.reference.qwen import (
    ReferenceQwen,
    ReferenceQwen2_5,
    ReferenceQwen3,
    ReferenceQwen3_5,
)
from tests.support.reference.tiles import (
    ReferenceGemma3,
    ReferenceGemma4,
    ReferenceIdefics3,
    ReferenceLlama4,
)

REFERENCES: dict[str, type[Reference]] = {
    "Gemma3ForConditionalGeneration": ReferenceGemma3,
    "Gemma4ForConditionalGeneration": ReferenceGemma4,
    "Glm4vForConditionalGeneration": ReferenceGlm,
    "Glm4vMoeForConditionalGeneration": ReferenceGlm,
    "Idefics3ForConditionalGeneration": ReferenceIdefics3,
    "InternVLChatModel": ReferenceInternVLChat,
    "InternVLForConditionalGeneration": ReferenceInternVL,
    "Llama4ForConditionalGeneration": ReferenceLlama4,
    "LlavaForConditionalGeneration": ReferenceLlava,
    "LlavaNextForConditionalGeneration": ReferenceLlavaNext,
    "LlavaOnevisionForConditionalGeneration": ReferenceOnevision,
    "LlavaQwenForCausalLM": ReferenceLlavaVideo,
    "Mistral3ForConditionalGeneration": ReferenceMistral3,
    "PixtralForConditionalGeneration": ReferencePixtral,
    "Qwen2VLForConditionalGeneration": ReferenceQwen,
    "Qwen2_5_VLForConditionalGeneration": ReferenceQwen2_5,
    "Qwen3VLForConditionalGeneration": ReferenceQwen3,
    "Qwen3VLMoeForConditionalGeneration": ReferenceQwen3,
    "Qwen3_5ForConditionalGeneration": ReferenceQwen3_5,
    "Qwen3_5MoeForConditionalGeneration": ReferenceQwen3_5,
    "SmolVLMForConditionalGeneration": ReferenceIdefics3,
}
"""vLLM's architecture name -> its reference."""


def reference_of(model: Path) -> Reference:
    """The reference for a demo model."""
    return REFERENCES[_architecture_of(model)](model)


def _architecture_of(model: Path) -> str:
    config = model / "config.json"
    if not config.exists():  # Mistral's own format
        return "PixtralForConditionalGeneration"
    return json.loads(config.read_text())["architectures"][0]


__all__ = ["REFERENCES", "Reference", "reference_of"]

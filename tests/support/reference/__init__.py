# SPDX-License-Identifier: Apache-2.0
"""AnchorPrune from the paper's equations, on transformers in eager mode.

Shares no code with the plugin: attention matrices are dense, layouts and positions are
transformers' own, selection is plain numpy in float64.
"""

import json
from pathlib import Path

from tests.support.reference.base import Reference
from tests.support.reference.llava import ReferenceLlava, ReferenceLlavaNext
from tests.support.reference.llava_video import ReferenceLlavaVideo
from tests.support.reference.onevision import ReferenceOnevision
from tests.support.reference.qwen import ReferenceQwen, ReferenceQwen2_5, ReferenceQwen3
from tests.support.reference.tiles import ReferenceGemma3, ReferenceInternVL

_BY_TYPE: dict[str, type[Reference]] = {
    "gemma3": ReferenceGemma3,
    "internvl": ReferenceInternVL,
    "llava": ReferenceLlava,
    "llava_next": ReferenceLlavaNext,
    "llava_onevision": ReferenceOnevision,
    "llava_qwen": ReferenceLlavaVideo,
    "qwen2_5_vl": ReferenceQwen2_5,
    "qwen2_vl": ReferenceQwen,
    "qwen3_vl": ReferenceQwen3,
    "qwen3_vl_moe": ReferenceQwen3,
}


def reference_of(model: Path) -> Reference:
    """The reference for a demo model."""
    return _BY_TYPE[json.loads((model / "config.json").read_text())["model_type"]](model)


__all__ = ["Reference", "reference_of"]

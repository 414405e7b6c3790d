# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights of many model families, in the hub's file format.

Each file describes models that are alike, as data; `hub_format.py` writes what they describe.
"""

from __future__ import annotations

from anchorprune_vllm.testing.tiny_models.description import TinyModel
from anchorprune_vllm.testing.tiny_models.gemma import GEMMA_MODELS
from anchorprune_vllm.testing.tiny_models.glm import GLM_MODELS
from anchorprune_vllm.testing.tiny_models.other import OTHER_MODELS
from anchorprune_vllm.testing.tiny_models.pixtral import PIXTRAL_MODELS
from anchorprune_vllm.testing.tiny_models.qwen import QWEN_MODELS
from anchorprune_vllm.testing.tiny_models.tiles import TILED_MODELS

TINY_MODELS: dict[str, TinyModel] = {
    **QWEN_MODELS,
    **GLM_MODELS,
    **GEMMA_MODELS,
    **TILED_MODELS,
    **PIXTRAL_MODELS,
    **OTHER_MODELS,
}
"""All tiny models by name."""

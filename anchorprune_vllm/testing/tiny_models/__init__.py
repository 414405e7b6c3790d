# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights of many model families, in the hub's file format.

One file describes a family, or a few that are alike; `checkpoint.py` writes what they describe.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing transformers takes seconds
    from anchorprune_vllm.testing.tiny_models.checkpoint import Checkpoint

FAMILIES = {
    "qwen3-vl": "qwen_vl:qwen3_vl",
    "qwen2-vl": "qwen_vl:qwen2_vl",
    "internvl": "internvl:internvl",
    "glm-4v": "glm:glm4v",
    "mistral3": "pixtral_tower:mistral3",
    "idefics3": "idefics:idefics3",
    "smolvlm": "idefics:smolvlm",
    "llama4": "llama4:llama4",
}
"""Name of a family → the module of this package and the function in it that describe its model."""


def describe_family(name: str) -> Checkpoint:
    """Return the description of the tiny model of one of `FAMILIES`.

    Raises ValueError if a package that its processor needs is not installed.
    """
    module, function = FAMILIES[name].split(":")
    try:
        checkpoint: Checkpoint = getattr(import_module(f"{__name__}.{module}"), function)()
    except ImportError as error:
        raise ValueError(f"{name}: {error}") from error
    return checkpoint

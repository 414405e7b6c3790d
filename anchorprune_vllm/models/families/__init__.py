# SPDX-License-Identifier: Apache-2.0
"""Families tell the general adapter what it would otherwise have to find out about a model.

Each family is a small class with the hooks that it overrides; `base.py` has all hooks. Other
packages provide families through the entry point group `anchorprune.families`, by architecture.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

ENTRY_POINTS = "anchorprune.families"

_GLM = f"{__name__}.plain:Glm"
_RASTER = f"{__name__}.plain:Raster"
_CONSECUTIVE = f"{__name__}.plain:Consecutive"
_QWEN = f"{__name__}.qwen:Qwen"
_WINDOWED = f"{__name__}.plain:Windowed"
_INTERNVL = f"{__name__}.internvl:InternVL"

FAMILIES = {
    "Exaone4_5_ForConditionalGeneration": _WINDOWED,
    "Gemma3ForConditionalGeneration": _RASTER,
    "Gemma4ForConditionalGeneration": f"{__name__}.gemma4:Gemma4",
    "Glm4vForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _GLM,
    "GlmOcrForConditionalGeneration": _GLM,
    "Idefics3ForConditionalGeneration": _RASTER,
    "InternS1ForConditionalGeneration": _INTERNVL,
    "InternS2PreviewForConditionalGeneration": _CONSECUTIVE,
    "InternVLChatModel": _INTERNVL,
    "InternVLForConditionalGeneration": _INTERNVL,
    "Lfm2VlForConditionalGeneration": f"{__name__}.plain:Lfm2",
    "LightOnOCRForConditionalGeneration": f"{__name__}.plain:UnbrokenRaster",
    "Llama4ForConditionalGeneration": f"{__name__}.plain:RasterBeforeClassToken",
    "Mistral3ForConditionalGeneration": _RASTER,
    "MuseGlimmerForConditionalGeneration": f"{__name__}.muse_glimmer:MuseGlimmer",
    "PixtralForConditionalGeneration": f"{__name__}.plain:ExpandedRaster",
    "Qwen2VLForConditionalGeneration": f"{__name__}.qwen:Qwen2",
    "Qwen2_5_VLForConditionalGeneration": f"{__name__}.qwen:Qwen2_5",
    "Qwen2_5OmniForConditionalGeneration": _WINDOWED,
    "Qwen2_5OmniModel": _WINDOWED,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "SmolVLMForConditionalGeneration": _RASTER,
}
"""Families as "module:class", by vLLM's architecture name; strings avoid early imports."""


def family_of(architecture: str) -> type[Any]:
    """Return the family of an architecture, or `Family` itself if it has none.

    Raises ValueError if a family of another package cannot be imported or is not a family.
    """
    from anchorprune_vllm.models.families.base import Family

    if architecture in FAMILIES:
        module, name = FAMILIES[architecture].split(":")
        return getattr(import_module(module), name)
    point = _installed().get(architecture)
    return Family if point is None else _load(point, Family)


def packages_of_families() -> dict[str, str]:
    """Return the names of other packages that provide a family, by architecture."""
    return {
        name: point.dist.name if point.dist else point.value for name, point in _installed().items()
    }


def _load(point: EntryPoint, base: type) -> Any:
    where = f"the family {point.value} of {point.name} (entry point group {ENTRY_POINTS}"
    where += f", package {point.dist.name})" if point.dist else ")"
    way_out = "fix or uninstall that package, or leave out --anchorprune-budget"
    try:
        found = point.load()
    except Exception as error:  # a module of another package may raise anything
        raise ValueError(
            f"anchorprune: {where} does not import ({type(error).__name__}: {error}); {way_out}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            f"anchorprune: {where} is {found!r}; it must be a subclass of "
            f"anchorprune_vllm.models.families.base.Family: {way_out}"
        )
    return found


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the entry points of other packages by architecture; none replaces one of ours."""
    return {
        point.name: point
        for point in entry_points(group=ENTRY_POINTS)
        if point.name not in FAMILIES
    }

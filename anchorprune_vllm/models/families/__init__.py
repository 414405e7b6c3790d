# SPDX-License-Identifier: Apache-2.0
"""Families: what the general adapter is told about models that it need not find out.

One small file each, of the hooks that it overrides (`base.py` has all of them). Packages of others
bring theirs through the entry point group `anchorprune.families`, under an architecture's name.
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
"""vLLM's architecture name -> "module:class": strings, so that nothing is imported early."""


def family_of(architecture: str) -> type[Any]:
    """Return the family of an architecture; `Family` itself if there is none.

    Raises ValueError if another package's does not import, or is no family.
    """
    from anchorprune_vllm.models.families.base import Family

    if architecture in FAMILIES:
        module, name = FAMILIES[architecture].split(":")
        return getattr(import_module(module), name)
    point = _installed().get(architecture)
    return Family if point is None else _load(point, Family)


def packages_of_families() -> dict[str, str]:
    """Return the packages of others that bring a family, by architecture."""
    return {
        name: point.dist.name if point.dist else point.value for name, point in _installed().items()
    }


def _load(point: EntryPoint, base: type) -> Any:
    where = f"the family {point.value} of {point.name} (entry point group {ENTRY_POINTS}"
    where += f", package {point.dist.name})" if point.dist else ")"
    way_out = "mend or uninstall that package, or leave out --anchorprune-budget"
    try:
        found = point.load()
    except Exception as error:  # whatever somebody's module does
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
    """Return the entry points of other packages by architecture; ours cannot be replaced."""
    return {
        point.name: point
        for point in entry_points(group=ENTRY_POINTS)
        if point.name not in FAMILIES
    }

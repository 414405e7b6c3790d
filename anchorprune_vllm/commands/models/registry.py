# SPDX-License-Identifier: Apache-2.0
"""What the model classes in the installed vLLM's registry tell without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anchorprune_vllm.commands.models.record import Architecture
from anchorprune_vllm.media_tokens import MODALITIES
from anchorprune_vllm.models import ARCHITECTURES, model_class


def multimodal_architectures() -> list[str]:
    """Return the names in vLLM's multimodal registry, and those of this package."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    return sorted({*_MULTIMODAL_MODELS, *ARCHITECTURES})


def installed_architectures(known: Mapping[str, Architecture]) -> dict[str, Architecture]:
    """Return the architectures of the installed vLLM; only the classes of unknown ones are read."""
    names = multimodal_architectures()
    return {name: known[name] if name in known else look_at(name) for name in names}


def look_at(name: str) -> Architecture:
    """Return what the class of an architecture tells about it."""
    if name in ARCHITECTURES:
        return Architecture(model_class(name).modalities)
    from vllm import ModelRegistry
    from vllm.multimodal.processing import EncDecMultiModalProcessor

    try:
        model: Any = ModelRegistry.models[name].load_model_cls()
        factory = model._processor_factory
    except (ImportError, AttributeError) as error:
        why = str(error).splitlines()[0]
        return Architecture(("unknown",), untried=f"vLLM's class cannot be had here: {why}")
    processor = factory.processor
    is_encoder_decoder = isinstance(processor, type) and issubclass(
        processor, EncDecMultiModalProcessor
    )
    refused = "it is an encoder-decoder" if is_encoder_decoder else ""
    return Architecture(_media(model, factory.info), refused)


def _media(model: Any, info: Any) -> tuple[str, ...]:
    """Return the modalities that a model takes, by its limits or else by its placeholders."""
    try:
        limits = {*info.get_supported_mm_limits(object.__new__(info))}
    except (AttributeError, TypeError):  # it reads the configuration of a checkpoint
        limits = set()
    seen = tuple(modality for modality in MODALITIES if modality in limits)
    if seen or limits == {"audio"}:
        return seen
    return tuple(modality for modality in MODALITIES if _has_placeholder(model, modality))


def _has_placeholder(model: Any, modality: str) -> bool:
    try:
        return model.get_placeholder_str(modality, 1) is not None
    except ValueError:  # how vLLM's models refuse a modality
        return False

# SPDX-License-Identifier: Apache-2.0
"""Make vLLM's model registry return a class that prunes for every image model with a budget."""

from __future__ import annotations

import functools
from typing import Any


def wrap_resolve_model_cls(original: Any) -> Any:
    """Wrap `resolve_model_cls` to replace the class of an image model with a budget."""

    @functools.wraps(original)
    def resolve_model_cls(self: Any, architectures: Any, model_config: Any) -> tuple[type, str]:
        model, architecture = original(self, architectures, model_config)
        return pruned_class(model, architecture, model_config), architecture

    return resolve_model_cls


def pruned_class(model: type, architecture: str, model_config: Any) -> type:
    """Return the class that serves a model, which is vLLM's own unless there is a budget.

    One of our classes stays if it is made for such a checkpoint or if vLLM has none for it.
    """
    from anchorprune_vllm.config import CONFIG_KEY
    from anchorprune_vllm.models import vllms_class
    from anchorprune_vllm.models.pruned_model import PrunedModel

    if not hasattr(model_config.hf_config, CONFIG_KEY):
        return model
    if issubclass(model, PrunedModel):
        if model.fits(model_config.hf_config) or vllms_class(architecture) is None:
            return model
        model = vllms_class(architecture)
    from vllm.model_executor.models.interfaces import supports_multimodal

    from anchorprune_vllm.models.families import family_of
    from anchorprune_vllm.models.general.adapter import generalize, keeps_mrope

    if not supports_multimodal(model):
        return model
    family: Any = family_of(architecture)
    return generalize(model, family, keeps_mrope(model, model_config.hf_config))

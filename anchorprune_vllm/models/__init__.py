# SPDX-License-Identifier: Apache-2.0
"""Models that can be pruned, each a subclass of vLLM's own class.

vLLM loads them from here by the names of its architectures: `anchorprune_vllm.models:Llava…`. It
caches what it learns about a model until a file in this folder changes.
"""

from importlib import import_module
from typing import Any

from anchorprune_vllm.config import CONFIG_KEY
from anchorprune_vllm.vllm_patches.hooks import HookGone, check_hooks

ARCHITECTURES = {
    "LlavaForConditionalGeneration": "anchorprune_vllm.models.llava.llava:PrunedLlava",
    "LlavaNextForConditionalGeneration": "anchorprune_vllm.models.llava.llava_next:PrunedLlavaNext",
    "LlavaOnevisionForConditionalGeneration": (
        "anchorprune_vllm.models.llava.llava_onevision:PrunedOnevision"
    ),
    "LlavaQwenForCausalLM": "anchorprune_vllm.models.llava.llava_video:PrunedLlavaVideo",
    "Qwen2_5_VLForConditionalGeneration": "anchorprune_vllm.models.qwen2_5_vl:PrunedQwen",
}
"""Our classes as "module:class", by vLLM's architecture name; strings avoid early imports."""

_vllms_own: dict[str, Any] = {}
"""vLLM's own registry entries by architecture name, for those that vLLM knows."""


def register_models() -> None:
    """Register our models in place of vLLM's; safe to call again."""
    from vllm import ModelRegistry

    if not _vllms_own:
        known = ModelRegistry.models
        _vllms_own.update({name: known[name] for name in ARCHITECTURES if name in known})
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")


def model_class(architecture: str) -> Any:
    """Return our class for one of `ARCHITECTURES`.

    Raises HookGone if vLLM lacks something that even the unpruned model needs.
    """
    module, name = ARCHITECTURES[architecture].split(":")
    try:
        model = getattr(import_module(module), name)
        check_hooks(model, native=False)
    except (ImportError, AttributeError, TypeError) as error:
        raise HookGone(f"lacks what pruning needs ({error})") from error
    return model


def vllms_class(architecture: str) -> Any:
    """Return vLLM's class for one of `ARCHITECTURES`, or None if it has none."""
    entry = _vllms_own.get(architecture)
    return None if entry is None else entry.load_model_cls()


def __getattr__(name: str) -> Any:
    """Return the class that vLLM loads for an architecture: ours, or vLLM's if ours fails."""
    if name not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return model_class(name)
    except HookGone as error:
        vllms = vllms_class(name)
        if vllms is None:
            raise
        return _unpruned(vllms, error)


def _unpruned(model: Any, reason: HookGone) -> Any:
    """Return a subclass of vLLM's own model that refuses to be served with a budget."""

    class Unpruned(model):
        # vLLM inspects the signature to see how to call it.
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            if hasattr(vllm_config.model_config.hf_config, CONFIG_KEY):
                raise reason
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    return Unpruned

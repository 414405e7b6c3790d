# SPDX-License-Identifier: Apache-2.0
"""The changes made to vLLM at run time where it offers no hook, listed as data and applied once.

Each patch says what it changes, why no hook can replace it, and when it can go. If its target no
longer exists, there is a warning while pruning is off, and an error with a budget. For each patch,
`patches/` in the repository has the change to vLLM that makes it unnecessary. A vLLM that has this
change is not patched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anchorprune_vllm.flags import add_flags
from anchorprune_vllm.vllm_patches.cpu_model_runner import wrap_load_model
from anchorprune_vllm.vllm_patches.encoder_cache import wrap_initialize_from_config
from anchorprune_vllm.vllm_patches.engine_args import (
    check_model_config,
    wrap_add_cli_args,
    wrap_create_model_config,
)
from anchorprune_vllm.vllm_patches.hooks import HookGone, check_hooks, find
from anchorprune_vllm.vllm_patches.model_registry import pruned_class, wrap_resolve_model_cls

_ORIGINAL = "__anchorprune_original__"


@dataclass(frozen=True)
class Patch:
    """A replacement of `owner.name` by `wrap(original)`, unless vLLM has what `diff` adds."""

    owner: str
    """The class to patch, as "module:Class"."""
    name: str
    wrap: Callable[[Any], Any]
    why: str
    until: str
    diff: str
    """The file in `patches/`."""
    added: str
    """What the diff adds, as "module:function" or "module:Class.method"."""
    registered: Callable[..., object] | None = None
    """The function to register with what the diff adds, or None if there is none."""
    only_on_cpu: bool = False
    """Whether the patch is ignored on platforms other than CPUs."""

    def apply(self) -> None:
        """Apply the patch; safe to call again.

        Raises HookGone if vLLM no longer has the target.
        """
        added = find(self.added)
        if added is not None:
            if self.registered is not None:
                added(self.registered)
            return
        owner = find(self.owner)
        original = None if owner is None else vars(owner).get(self.name)
        if original is None:
            raise HookGone(f"has no {self.owner}.{self.name}, which the plugin extends")
        if hasattr(_function(original), _ORIGINAL):
            return
        replacement = self.wrap(original)
        setattr(_function(replacement), _ORIGINAL, original)
        setattr(owner, self.name, replacement)


def _function(attribute: Any) -> Any:
    """Return the function inside a static or class method, or the function itself."""
    return getattr(attribute, "__func__", attribute)


PATCHES = (
    Patch(
        owner="vllm.engine.arg_utils:EngineArgs",
        name="add_cli_args",
        wrap=wrap_add_cli_args,
        why="general plugins cannot add command-line flags",
        until="vLLM lets a general plugin extend the parser",
        diff="0001-engine-args-cli-hook.patch",
        added="vllm.engine.arg_utils:register_cli_args",
        registered=add_flags,
    ),
    Patch(
        owner="vllm.engine.arg_utils:EngineArgs",
        name="create_model_config",
        wrap=wrap_create_model_config,
        why="for models that are not ours nothing reads unknown keys of hf_overrides, and errors "
        "in them would only show in the worker",
        until="vLLM lets a general plugin check the model config",
        diff="0002-model-config-hook.patch",
        added="vllm.engine.arg_utils:register_model_config_hook",
        registered=check_model_config,
    ),
    Patch(
        owner="vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        name="load_model",
        wrap=wrap_load_model,
        why="it overrides the GPU runner's `load_model` and leaves out the lines that check "
        "whether the model's embeddings carry positions",
        until="vLLM's CPU runner looks, as its GPU runners do",
        diff="0003-cpu-runner-multimodal-encoding.patch",
        added="vllm.v1.worker.gpu_model_runner:GPUModelRunner._setup_multimodal_encoding",
        only_on_cpu=True,
    ),
    Patch(
        owner="vllm.v1.worker.worker_base:WorkerWrapperBase",
        name="initialize_from_config",
        wrap=wrap_initialize_from_config,
        why="a model is not told when the encoder cache is emptied, and the outputs that it caches "
        "itself would outlive the weights that they were made with",
        until="vLLM's runners tell the model",
        diff="0004-reset-encoder-cache-of-models.patch",
        added="vllm.model_executor.models.interfaces:supports_encoder_cache_reset",
    ),
    Patch(
        owner="vllm.model_executor.models.registry:_ModelRegistry",
        name="resolve_model_cls",
        wrap=wrap_resolve_model_cls,
        why="classes registered for every image model would also serve models without a budget",
        until="vLLM lets a general plugin choose the class by the model's config",
        diff="0005-model-class-hook.patch",
        added="vllm.model_executor.models.registry:register_model_cls_hook",
        registered=pruned_class,
    ),
)


def apply_patches() -> None:
    """Apply all patches; safe to call again.

    Raises HookGone if one cannot be applied, after the others have been.
    """
    from vllm.platforms import current_platform

    gone: list[HookGone] = []
    for patch in PATCHES:
        if current_platform.is_cpu() or not patch.only_on_cpu:
            try:
                patch.apply()
            except HookGone as error:
                gone.append(error)
    if gone:
        raise gone[0]


def check_vllm(model: type, *, native: bool) -> None:
    """Raise HookGone if this vLLM lacks something that one of our models needs to prune."""
    check_hooks(model, native=native)
    apply_patches()

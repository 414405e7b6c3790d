# SPDX-License-Identifier: Apache-2.0
"""What pruning takes from vLLM beyond its documented interfaces: listed as data, checked at load.

A newer vLLM in which all of it is there is served with a warning. Where something is gone, pruning
is refused in one line that names it; without a budget vLLM's own models are served instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

TESTED = ("0.32", "0.33")
"""Versions of vLLM that the tests have run on."""
PACKAGE = "anchorprune_vllm"


class HookGone(ValueError):
    """This vLLM lacks something that pruning needs; the message says what, and what to do."""

    def __init__(self, lacks: str) -> None:
        super().__init__(
            f"anchorprune: vLLM {version('vllm')} {lacks}; install a version that the plugin was "
            f"tested with ({', '.join(TESTED)}), or leave out --anchorprune-budget"
        )


@dataclass(frozen=True)
class Hook:
    """Something of vLLM's that `file` calls `name`."""

    file: str
    """In this package. What stands in `models/` is needed by the models made of that file alone."""
    name: str
    why: str
    target: str
    """"module:name" or "module:Class.name"."""
    is_for_native_positions: bool = False
    """Not needed where positions are compact."""

    def is_there(self) -> bool:
        return find(self.target) is not None


def find(path: str) -> Any:
    """Return what "module:name" or "module:Class.name" names, or None."""
    module, names = path.split(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the module is there, something that it imports is not
        return None
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


HOOKS = (
    Hook(
        "models/pruned_model.py",
        "is_multimodal_pruning_enabled",
        "answers yes on one config, so that runners read positions; vLLM ties it to its own video "
        "pruning",
        "vllm.config.multimodal:MultiModalConfig.is_multimodal_pruning_enabled",
        is_for_native_positions=True,
    ),
    Hook(
        "models/pruned_model.py",
        "recompute_mrope_positions",
        "the first model runner calls it with each chunk of a prompt that holds media",
        "vllm.model_executor.models.interfaces:SupportsMultiModalPruning.recompute_mrope_positions",
        is_for_native_positions=True,
    ),
    Hook(
        "models/pruned_model.py",
        "recompute_mrope_positions",
        "the second model runner calls it from here, and takes positions off the embeddings that "
        "drafts are made from",
        "vllm.v1.worker.gpu.model_states.mm_pruning:MultiModalPruner.recompute",
        is_for_native_positions=True,
    ),
    Hook(
        "models/pruned_model.py",
        "_processor_factory",
        "read from the model that ours extends, for when pruning is off",
        "vllm.model_executor.models.llava:LlavaForConditionalGeneration._processor_factory",
    ),
    Hook(
        "models/pruned_model.py",
        "get_model_state_cls",
        "set on models with native positions: the second runner keeps their deltas",
        "vllm.v1.worker.gpu.model_states:resolve_model_state_cls",
        is_for_native_positions=True,
    ),
    Hook(
        "worker/model_state.py",
        "update_prefill_positions",
        "replaced for vLLM's pruner of positions, which then writes no delta",
        "vllm.v1.worker.gpu.mm.rope:RopeState.update_prefill_positions",
        is_for_native_positions=True,
    ),
    Hook(
        "worker/model_state.py",
        "prefill_delta",
        "made anew with twice as many buffers",
        "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor",
        is_for_native_positions=True,
    ),
    Hook(
        "models/llava/contrastive.py",
        "weight_loader_numel",
        "0 for what no checkpoint of the model has, so that a reload does not wait for it",
        "vllm.model_executor.model_loader.reload.utils:get_tensor_load_numel",
    ),
    Hook(
        "engine_core/encoder_budget.py",
        "can_allocate",
        "overridden: the scheduler asks it for every item of a step",
        "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.can_allocate",
    ),
    Hook(
        "engine_core/encoder_budget.py",
        "get_freed_mm_hashes",
        "overridden: called once, at the end of a step",
        "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.get_freed_mm_hashes",
    ),
    Hook(
        "startup.py",
        "ec_manager_config",
        "set in the engine's arguments: names the class that counts",
        "vllm.config:EncoderCacheManagerConfig",
    ),
    Hook(
        "worker/warm_up.py",
        "JitWarmupRegistry",
        "runs the pruned way before vLLM watches for compilation",
        "vllm.model_executor.warmup.jit_warmup:JitWarmupRegistry.register",
    ),
    Hook(
        "worker/warm_up.py",
        "get_dummy_encoder_profile_inputs",
        "makes the items for that",
        "vllm.multimodal.encoder_budget:MultiModalBudget.get_dummy_encoder_profile_inputs",
    ),
    Hook(
        "models/linear_positions.py",
        "mrope_section",
        "set on a LLaVA's config, so that vLLM keeps positions per request",
        "vllm.transformers_utils.config:uses_mrope",
        is_for_native_positions=True,
    ),
    Hook(
        "models/general/adapter.py",
        "cudagraph_mm_encoder",
        "switched off: captured graphs run no forward hooks",
        "vllm.config:CompilationConfig.cudagraph_mm_encoder",
    ),
    Hook(
        "models/llava/llava_onevision.py",
        "_merge_image_patch_embeddings",
        "indices sent through it tell where patches end up",
        "vllm.model_executor.models.llava_onevision:"
        "LlavaOnevisionForConditionalGeneration._merge_image_patch_embeddings",
    ),
    Hook(
        "models/llava/contrastive.py",
        "_image_pixels_to_features",
        "the tower and the choice of its layer are vLLM's",
        "vllm.model_executor.models.llava:LlavaForConditionalGeneration._image_pixels_to_features",
    ),
    Hook(
        "worker/tower_taps.py",
        "register_forward_pre_hook",
        "takes query and key on their way into the encoder's attention",
        "vllm.model_executor.layers.attention.mm_encoder_attention:MMEncoderAttention.forward",
    ),
    Hook(
        "api/processor.py",
        "_get_mm_hashes",
        "overridden: question and budget become part of an item's identity",
        "vllm.multimodal.processing:BaseMultiModalProcessor._get_mm_hashes",
    ),
    Hook(
        "api/processor.py",
        "_get_cache_missing_processor_kwargs",
        "overridden: picks what is particular to each item",
        "vllm.multimodal.processing:BaseMultiModalProcessor._get_cache_missing_processor_kwargs",
    ),
    Hook(
        "api/processor.py",
        "_apply_hf_processor_main",
        "overridden: prepares each item alone, and remembers it for the next question",
        "vllm.multimodal.processing:BaseMultiModalProcessor._apply_hf_processor_main",
    ),
    Hook(
        "api/processor.py",
        "_get_mm_prompt_updates",
        "overridden: the one place where kept tokens are counted",
        "vllm.multimodal.processing:BaseMultiModalProcessor._get_mm_prompt_updates",
    ),
    Hook(
        "api/processor.py",
        "_recompute_cached_prompt_update",
        "overridden: content with another number keeps its plan",
        "vllm.multimodal.processing:BaseMultiModalProcessor._recompute_cached_prompt_update",
    ),
    Hook(
        "api/processor.py",
        "_maybe_apply_prompt_updates",
        "overridden: cuts the finished prompt",
        "vllm.multimodal.processing:BaseMultiModalProcessor._maybe_apply_prompt_updates",
    ),
    Hook(
        "api/processor.py",
        "_get_prompt_updates",
        "called without items, for what stands for them in a prompt",
        "vllm.multimodal.processing:BaseMultiModalProcessor._get_prompt_updates",
    ),
    Hook(
        "item_fields.py",
        "reduce_data",
        "joins the fields of some items as in a call of all",
        "vllm.multimodal.inputs:BaseMultiModalField.reduce_data",
    ),
    Hook(
        "startup.py",
        "_MODEL_ARCH_BY_HASH",
        "emptied: vLLM remembers the class of a model whatever its config",
        "vllm.model_executor.model_loader.utils:_MODEL_ARCH_BY_HASH",
    ),
    Hook(
        "models/general/adapter.py",
        "get_inputs_embeds_size",
        "the columns of a row in which it is compared with words",
        "vllm.config:ModelConfig.get_inputs_embeds_size",
    ),
    Hook(
        "models/pruned_model.py",
        "get_language_model",
        "embeds the words of a question, and the text of frames that stay",
        "vllm.model_executor.models.interfaces:SupportsMultiModal.get_language_model",
    ),
    Hook(
        "item_fields.py",
        "keep_on_cpu",
        "set on the counts of an item: of media that the prefix cache covers, only such fields "
        "reach the runner, which places the text behind them",
        "vllm.multimodal.utils:strip_covered_mm_data",
        is_for_native_positions=True,
    ),
    Hook(
        "api/requests.py",
        "apply_or_refuse",
        "set as `apply` on a processor of vLLM's, to refuse budgets while pruning is off",
        "vllm.multimodal.processing:BaseMultiModalProcessor.apply",
    ),
    Hook(
        "flags.py",
        "parse_known_args",
        "set on a parser, to write the flags into `hf_overrides`",
        "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_known_args",
    ),
)


def hooks_of(model: type, *, native: bool) -> Iterator[Hook]:
    """Those that a model of ours needs, with compact or with native positions."""
    modules = {part.__module__ for part in model.__mro__}
    for hook in HOOKS:
        module = f"{PACKAGE}.{hook.file.removesuffix('.py').replace('/', '.')}"
        is_of_model = not hook.file.startswith("models/") or module in modules
        if is_of_model and (native or not hook.is_for_native_positions):
            yield hook


def check_hooks(model: type, *, native: bool) -> None:
    """Raise HookGone if this vLLM lacks what a model of ours needs."""
    for hook in hooks_of(model, native=native):
        if not hook.is_there():
            raise HookGone(f"has no {hook.target}, which pruning needs ({hook.why})")


def warn_of_untested_version() -> None:
    """Say once that this vLLM is another than those of the tests."""
    installed = version("vllm")
    if installed.startswith(tuple(f"{tested}." for tested in TESTED)):
        return
    from anchorprune_vllm.log import logger

    logger.warning_once(
        "anchorprune: tested with vLLM %s, not with %s; all that pruning needs of it is there, so "
        "it is on",
        ", ".join(TESTED),
        installed,
    )

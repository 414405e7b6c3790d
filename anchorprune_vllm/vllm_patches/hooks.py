# SPDX-License-Identifier: Apache-2.0
"""What pruning uses of vLLM beyond its documented interfaces, listed as data and checked at load.

A newer vLLM that still has all of it is served with a warning. If something is gone, pruning is
refused in one line that names it; without a budget, vLLM's own models are served instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

TESTED = ("0.32", "0.33")
"""The versions of vLLM that the tests have run on."""
PACKAGE = "anchorprune_vllm"


class HookGone(ValueError):
    """Raised if vLLM lacks something that pruning needs; says what it is and what to do."""

    def __init__(self, lacks: str) -> None:
        super().__init__(
            f"anchorprune: vLLM {version('vllm')} {lacks}; install a version that the plugin was "
            f"tested with ({', '.join(TESTED)}), or leave out --anchorprune-budget"
        )


@dataclass(frozen=True)
class Hook:
    """A part of vLLM that `file` uses under `name`."""

    file: str
    """The file in this package. Only models built on a file in `models/` need its hooks."""
    name: str
    why: str
    target: str
    """The part of vLLM, as "module:name" or "module:Class.name"."""
    is_for_native_positions: bool = False
    """Whether it is needed only for native positions."""

    def is_there(self) -> bool:
        """Return whether this vLLM has the part."""
        return find(self.target) is not None


def find(path: str) -> Any:
    """Return the object at "module:name" or "module:Class.name", or None if there is none."""
    module, names = path.split(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the module exists, but something that it imports does not
        return None
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


HOOKS = (
    Hook(
        "models/pruned_model.py",
        "is_multimodal_pruning_enabled",
        "returns true for one config, so that runners read positions; vLLM ties it to its own "
        "video pruning",
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
        "the second model runner calls it here, and removes positions from the embeddings that "
        "draft models get",
        "vllm.v1.worker.gpu.model_states.mm_pruning:MultiModalPruner.recompute",
        is_for_native_positions=True,
    ),
    Hook(
        "models/pruned_model.py",
        "_processor_factory",
        "read from the parent model, to be used when pruning is off",
        "vllm.model_executor.models.llava:LlavaForConditionalGeneration._processor_factory",
    ),
    Hook(
        "models/pruned_model.py",
        "get_model_state_cls",
        "set on models with native positions, for which the second runner keeps deltas",
        "vllm.v1.worker.gpu.model_states:resolve_model_state_cls",
        is_for_native_positions=True,
    ),
    Hook(
        "worker/model_state.py",
        "update_prefill_positions",
        "replaced where vLLM's pruner writes positions, so that it writes no delta",
        "vllm.v1.worker.gpu.mm.rope:RopeState.update_prefill_positions",
        is_for_native_positions=True,
    ),
    Hook(
        "worker/model_state.py",
        "prefill_delta",
        "replaced by one with twice as many buffers",
        "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor",
        is_for_native_positions=True,
    ),
    Hook(
        "models/llava/contrastive.py",
        "weight_loader_numel",
        "set to 0 on tensors that no checkpoint has, so that a reload does not wait for them",
        "vllm.model_executor.model_loader.reload.utils:get_tensor_load_numel",
    ),
    Hook(
        "engine_core/encoder_budget.py",
        "can_allocate",
        "overridden: the scheduler calls it for every item of a step",
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
        "set in the engine's arguments to the class that counts unpruned tokens",
        "vllm.config:EncoderCacheManagerConfig",
    ),
    Hook(
        "worker/warm_up.py",
        "JitWarmupRegistry",
        "runs the pruned path before vLLM watches for compilation",
        "vllm.model_executor.warmup.jit_warmup:JitWarmupRegistry.register",
    ),
    Hook(
        "worker/warm_up.py",
        "get_dummy_encoder_profile_inputs",
        "makes the dummy items for the warm-up",
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
        "lays out the features of an image as the unpruned model does",
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
        "overridden: selects the requests of the items that are processed",
        "vllm.multimodal.processing:BaseMultiModalProcessor._get_cache_missing_processor_kwargs",
    ),
    Hook(
        "api/processor.py",
        "_apply_hf_processor_main",
        "overridden: processes each item alone, and caches it for the next question",
        "vllm.multimodal.processing:BaseMultiModalProcessor._apply_hf_processor_main",
    ),
    Hook(
        "api/processor.py",
        "_get_mm_prompt_updates",
        "overridden: the one place where plans are made",
        "vllm.multimodal.processing:BaseMultiModalProcessor._get_mm_prompt_updates",
    ),
    Hook(
        "api/processor.py",
        "_recompute_cached_prompt_update",
        "overridden: content that is rewritten with another number keeps its plan",
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
        "called without items, to learn which tokens stand for them in a prompt",
        "vllm.multimodal.processing:BaseMultiModalProcessor._get_prompt_updates",
    ),
    Hook(
        "item_fields.py",
        "reduce_data",
        "joins the fields of some items as vLLM does for all items of a call",
        "vllm.multimodal.inputs:BaseMultiModalField.reduce_data",
    ),
    Hook(
        "startup.py",
        "_MODEL_ARCH_BY_HASH",
        "emptied, because vLLM caches the class of a model without regard to the budget",
        "vllm.model_executor.model_loader.utils:_MODEL_ARCH_BY_HASH",
    ),
    Hook(
        "models/pruned_model.py",
        "get_inputs_embeds_size",
        "the number of columns of a row that are compared with words",
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
        "set on the counts of an item: if the prefix cache covers the item, only such fields reach "
        "the runner, which needs them for the positions of later text",
        "vllm.multimodal.utils:strip_covered_mm_data",
        is_for_native_positions=True,
    ),
    Hook(
        "api/requests.py",
        "apply_or_refuse",
        "set as `apply` on vLLM's own processor, to refuse budgets while pruning is off",
        "vllm.multimodal.processing:BaseMultiModalProcessor.apply",
    ),
    Hook(
        "flags.py",
        "parse_known_args",
        "replaced on a parser, to write the flags into `hf_overrides`",
        "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_known_args",
    ),
)


def hooks_of(model: type, *, native: bool) -> Iterator[Hook]:
    """Yield the hooks that one of our models needs, with compact or native positions."""
    modules = {part.__module__ for part in model.__mro__}
    for hook in HOOKS:
        module = f"{PACKAGE}.{hook.file.removesuffix('.py').replace('/', '.')}"
        is_of_model = not hook.file.startswith("models/") or module in modules
        if is_of_model and (native or not hook.is_for_native_positions):
            yield hook


def check_hooks(model: type, *, native: bool) -> None:
    """Raise HookGone if this vLLM lacks something that one of our models needs."""
    for hook in hooks_of(model, native=native):
        if not hook.is_there():
            raise HookGone(f"has no {hook.target}, which pruning needs ({hook.why})")


def warn_of_untested_version() -> None:
    """Log a warning, once, if the installed vLLM is not among the tested versions."""
    installed = version("vllm")
    if installed.startswith(tuple(f"{tested}." for tested in TESTED)):
        return
    from anchorprune_vllm.log import logger

    logger.warning_once(
        "anchorprune: tested with vLLM %s, not with %s; pruning is on, since everything that it "
        "needs is there",
        ", ".join(TESTED),
        installed,
    )

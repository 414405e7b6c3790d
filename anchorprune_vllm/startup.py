# SPDX-License-Identifier: Apache-2.0
"""Check and prepare a model once, after vLLM has read its config and before anything is loaded."""

from __future__ import annotations

from typing import Any

from anchorprune_vllm.config import CONFIG_KEY, PruneConfig, resembles_config_key
from anchorprune_vllm.log import logger
from anchorprune_vllm.methods.registry import check_method
from anchorprune_vllm.metrics.requests import start_metrics
from anchorprune_vllm.models import ARCHITECTURES, model_class
from anchorprune_vllm.vllm_patches import check_vllm
from anchorprune_vllm.vllm_patches.compile_hash import leave_out_of_hash
from anchorprune_vllm.vllm_patches.hooks import HookGone, warn_of_untested_version
from anchorprune_vllm.vllm_patches.model_registry import pruned_class


def prepare_model(engine_args: Any, model_config: Any) -> None:
    """Prepare vLLM to serve a model with pruning, if its config has a budget.

    Raises ValueError if the model cannot be pruned, or not with these engine arguments.
    """
    given = getattr(engine_args, "mm_processor_kwargs", None) or {}
    misplaced = [*filter(resembles_config_key, given)]
    if misplaced:
        raise ValueError(
            f"anchorprune: {misplaced[0]!r} in --mm-processor-kwargs is for single requests; set "
            "the server's defaults with --anchorprune-budget (offline: "
            f'hf_overrides={{"{CONFIG_KEY}": {{"budget": 64}}}})'
        )
    config = PruneConfig.of_model(model_config.hf_config)
    if config is None:
        _prepare_unpruned(model_config)
        return
    # This is the architecture that vLLM chose; `--model-impl` may change that of the checkpoint.
    served_by = _served_by(model_config)
    native = config.has_native_positions(served_by.default_positions)
    check_vllm(served_by, native=native)
    warn_of_untested_version()
    _check_other_features(engine_args, model_config)
    _check_deployment(engine_args)
    if native:
        _check_native_positions(engine_args)
    served_by.prepare(model_config)
    check_method(config)
    served_by.check(model_config, config)
    if native:
        served_by.use_native_positions(model_config.hf_config)
    _count_unpruned_work(engine_args)
    leave_out_of_hash(model_config)
    if not engine_args.disable_log_stats:
        start_metrics(model_config, served_by.modalities)


def _served_by(model_config: Any) -> Any:
    """Return our class that serves a model; raise ValueError if the model cannot be pruned."""
    from vllm.model_executor.model_loader import utils

    utils._MODEL_ARCH_BY_HASH.clear()  # it may have the class of an earlier run without a budget
    if model_config.architecture in ARCHITECTURES:
        served = model_class(model_config.architecture)
        return pruned_class(served, model_config.architecture, model_config)
    if not model_config.is_multimodal_model or model_config.is_encoder_decoder:
        raise ValueError(
            f"anchorprune: {model_config.architecture} is not a decoder that sees images, so it "
            "cannot be pruned. Leave out --anchorprune-budget to serve it unpruned"
        )
    if model_config.using_transformers_backend():
        raise ValueError(
            f"anchorprune: {model_config.architecture} is the Transformers backend, which cannot "
            "be pruned; leave out --model-impl transformers if vLLM has the model itself, or "
            "--anchorprune-budget"
        )
    served, architecture = model_config.registry.resolve_model_cls(
        model_config.architectures, model_config=model_config
    )
    return pruned_class(served, architecture, model_config)


# Arguments that are only read to be refused have a default here, because a vLLM that no longer has
# them can be served.


def _check_other_features(engine_args: Any, model_config: Any) -> None:
    """Raise ValueError for features of vLLM that cannot be combined with pruning."""
    if engine_args.enable_lora and getattr(engine_args, "enable_tower_connector_lora", False):
        raise ValueError(
            "anchorprune: LoRA adapters on the vision tower or projector cannot be combined with "
            "pruning; leave out --enable-tower-connector-lora (adapters on the language model work)"
        )
    if getattr(model_config.multimodal_config, "video_pruning_rate", None):
        raise ValueError(
            "anchorprune: vLLM's own --video-pruning-rate and --anchorprune-budget both choose "
            "visual tokens; give one of them"
        )
    if getattr(engine_args.compilation_config, "compile_mm_encoder", False):
        raise ValueError(
            "anchorprune: the attention of a compiled vision encoder cannot be read; leave out "
            "compile_mm_encoder in --compilation-config"
        )


def _count_unpruned_work(engine_args: Any) -> None:
    """Let the scheduler count the vision tower's work, unless the user chose another manager."""
    from vllm.config import EncoderCacheManagerConfig

    from anchorprune_vllm.engine_core.encoder_budget import CLASS_PATH

    given = engine_args.ec_manager_config.encoder_cache_manager_cls
    if given is None:
        engine_args.ec_manager_config = EncoderCacheManagerConfig(CLASS_PATH)
    elif given != CLASS_PATH:
        logger.warning(
            "AnchorPrune: the encoder cache manager %s counts the tokens that are left of an image "
            "or video; a step may run the vision tower on many more than without pruning",
            given,
        )
    if engine_args.mm_processor_cache_type == "shm":
        # The scheduler then gets addresses instead of items, and cannot read their plans.
        logger.warning(
            "AnchorPrune: with --mm-processor-cache-type shm the scheduler counts the tokens that "
            "are left of an image or video. The vision tower then processes a step in parts, and "
            "requests that decode wait for it; the cache type lru avoids that"
        )


def _check_deployment(engine_args: Any) -> None:
    """Raise ValueError for deployments that have not been tried or cannot work with pruning."""
    from vllm import envs

    transfer = getattr(engine_args, "ec_transfer_config", None)
    if isinstance(transfer, dict):  # offline, it may be given as a dictionary
        from vllm.config import ECTransferConfig

        transfer = ECTransferConfig(**transfer)
    is_encoder_only = getattr(engine_args, "mm_encoder_only", False)
    if is_encoder_only or getattr(transfer, "is_encode_only", False):
        flag = "--mm-encoder-only" if is_encoder_only else "--ec-transfer-config"
        raise ValueError(
            "anchorprune: pruning has not been tried with an instance that only encodes media (for "
            "Qwen2.5-VL it lacks the word embeddings that questions are matched with); leave out "
            f"{flag}, so that one instance does both, or leave out --anchorprune-budget on this "
            "instance and on those that it encodes for"
        )
    if getattr(envs, "VLLM_USE_RUST_FRONTEND", False):
        raise ValueError(
            "anchorprune: vLLM's Rust front end makes prompts by itself, with all visual tokens; "
            "unset VLLM_USE_RUST_FRONTEND to serve with the Python one"
        )
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(engine_args, name, 1)
        if size > 1:
            raise ValueError(
                "anchorprune: pruning has not been tried with context parallelism; give "
                f"--{name.replace('_', '-')} 1 instead of {size}, or use tensor parallelism"
            )


def _prepare_unpruned(model_config: Any) -> None:
    """Prepare one of our models without a budget; if that is impossible, vLLM's own is served."""
    if model_config.architecture in ARCHITECTURES:
        try:
            served_by = model_class(model_config.architecture)
        except HookGone:
            return
        served_by.prepare(model_config)


def _check_native_positions(engine_args: Any) -> None:
    """Raise ValueError for features that vLLM cannot combine with positions from the encoder."""
    prefix = "anchorprune: native positions cannot be combined with"
    if engine_args.pipeline_parallel_size > 1:
        # Only the first of several stages sees the media and learns their positions.
        raise ValueError(
            f"{prefix} pipeline parallelism; give --pipeline-parallel-size 1 instead of "
            f"{engine_args.pipeline_parallel_size}"
        )
    if getattr(engine_args, "enable_prompt_embeds", False):
        raise ValueError(f"{prefix} embeddings as prompts; leave out --enable-prompt-embeds")

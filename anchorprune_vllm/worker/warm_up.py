# SPDX-License-Identifier: Apache-2.0
"""Run the pruned path on vLLM's dummy items before the server is ready.

Kernels are compiled on first use. vLLM runs everything that a request runs before it reports to be
ready, and with `--jit-monitor-mode=error` a compilation after that ends the engine. The model sees
dummy items when vLLM profiles its memory; where that is skipped, they are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry, VllmJitKernel
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from anchorprune_vllm.worker.pruner import VisualPruner


def warm_up_without_profiling(
    pruner: VisualPruner, embed: Callable[..., Any], vllm_config: VllmConfig
) -> None:
    """Ask vLLM to warm up a pruner together with its own kernels.

    Nothing is done if the pruner has seen dummy items by then. Call this while the model is being
    made, because that is when vLLM collects what it will compile.

    Args:
        pruner: The pruner to warm up.
        embed: The method `embed_multimodal` of the pruner's model.
        vllm_config: The config of the engine.
    """
    JitWarmupRegistry.register(_PrunedWay(pruner, embed, vllm_config))


def warm_up_now(model: Any, vllm_config: VllmConfig) -> None:
    """Run the pruned path of a loaded model where vLLM neither profiles nor warms up kernels."""
    way = _PrunedWay(model._pruner, model.embed_multimodal, vllm_config)
    for key in way.get_warmup_keys():
        way.compile(key)


class _PrunedWay(VllmJitKernel[None]):
    """The kernels between vision tower and language model, which are compiled by running them."""

    def __init__(
        self, pruner: VisualPruner, embed: Callable[..., Any], vllm_config: VllmConfig
    ) -> None:
        self._pruner = pruner
        self._embed = embed
        self._config = vllm_config

    def get_warmup_keys(self) -> list[None]:
        return [] if self._pruner.is_warm else [None]

    @torch.inference_mode()
    def compile(self, compile_key: None) -> None:
        """Embed one dummy item of the largest modality."""
        budget = MultiModalBudget(self._config, MULTIMODAL_REGISTRY, enable_cache=False)
        items = budget.get_dummy_encoder_profile_inputs(max_items_per_batch=1)
        device = self._config.device_config.device
        for _, _, kwargs in group_and_batch_mm_kwargs(items, device=device):
            self._embed(**kwargs)

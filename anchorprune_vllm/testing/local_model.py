# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's processor and model in this process, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.utils import group_and_batch_mm_kwargs

import anchorprune_vllm
from anchorprune_vllm.plan import ItemPlan, pop_plans
from anchorprune_vllm.testing.demo_models.make import find_text_encoder


@contextmanager
def one_rank(scratch: Path) -> Iterator[None]:
    """Set up the process group that models need, with this process as its only member."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{scratch / 'rendezvous'}", 0, "gloo")
        initialize_model_parallel()
    try:
        yield
    finally:
        cleanup_dist_env_and_memory()


class LocalModel:
    """A pruned model that is loaded, and its processor; use it inside `one_rank`.

    `options` are arguments of vLLM's `EngineArgs`, or "settings": the pruning settings.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        anchorprune_vllm.register()
        prune = {"budget": 16, "feature_cache_mb": 8, **options.pop("settings", {})}
        if text_encoder := find_text_encoder(path):
            prune.setdefault("text_encoder", str(text_encoder))
        arguments = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "disable_log_stats": True,  # Nobody scrapes this process.
            **options,
            "hf_overrides": {"anchorprune": prune, **options.get("hf_overrides", {})},
        }
        self.config = EngineArgs(model=str(path), **arguments).create_engine_config()
        self.processor = MULTIMODAL_REGISTRY.create_processor(self.config.model_config)
        # vLLM's CPU worker patches this for the whole process.
        with set_current_vllm_config(self.config), patch("torch.accelerator.empty_cache"):
            self.model = get_model(vllm_config=self.config)

    def process(self, prompt: str, *media: Any, budget: int | str, **options: Any) -> Any:
        """Return what the API process makes of a prompt; `options` go to the HF processor."""
        data: dict[str, list[Any]] = {}
        for item in media:
            data.setdefault("image" if isinstance(item, Image.Image) else "video", []).append(item)
        return self.processor(
            prompt,
            self.processor.info.parse_mm_data(data),
            hf_processor_mm_kwargs={"anchorprune": {"budget": budget}, **options},
        )

    def batches(self, *processed: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield modality and arguments of the calls of the model, batched as in the worker."""
        items = [
            (modality, item)
            for out in processed
            for modality, of_modality in out["mm_kwargs"].items()
            for item in of_modality
        ]
        device = self.config.device_config.device
        for modality, _, kwargs in group_and_batch_mm_kwargs(items, device=device):
            yield modality, kwargs

    @torch.inference_mode()
    def embed(self, *processed: Any) -> list[torch.Tensor]:
        """Return what the worker makes of all media of some processed prompts."""
        return [
            rows
            for _, kwargs in self.batches(*processed)
            for rows in self.model.embed_multimodal(**kwargs)
        ]


def plans_of(processed: Any, modality: str = "image") -> list[ItemPlan]:
    """Return the plans that travel with the media of a processed prompt."""
    plans = pop_plans(modality, dict(processed["mm_kwargs"].get_data()))
    assert plans is not None
    return plans

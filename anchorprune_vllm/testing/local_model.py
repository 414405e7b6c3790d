# SPDX-License-Identifier: Apache-2.0
"""vLLM's processor and model in this process, without an engine."""

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
    """The process group that models need, of this process alone."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{scratch / 'rendezvous'}", 0, "gloo")
        initialize_model_parallel()
    try:
        yield
    finally:
        cleanup_dist_env_and_memory()


class LocalModel:
    """A pruned model, loaded, and its processor.

    To be used inside `one_rank`. `options` are those of vLLM's `EngineArgs`, and `settings` of
    pruning.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        anchorprune_vllm.register()
        prune = {"budget": 16, "feature_cache_mb": 8, **options.pop("settings", {})}
        if text_encoder := find_text_encoder(path):
            prune.setdefault("text_encoder", str(text_encoder))
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "disable_log_stats": True,  # nobody scrapes this process
        }
        overrides = {"anchorprune": prune, **options.pop("hf_overrides", {})}
        self.config = EngineArgs(
            model=str(path), hf_overrides=overrides, **{**defaults, **options}
        ).create_engine_config()
        self._device = self.config.device_config.device
        self.processor = MULTIMODAL_REGISTRY.create_processor(self.config.model_config)
        # vLLM's CPU worker does the same to torch, but for the whole process.
        with set_current_vllm_config(self.config), patch("torch.accelerator.empty_cache"):
            self.model = get_model(vllm_config=self.config)

    def process(self, prompt: str, *media: Any, budget: int | str, **options: Any) -> Any:
        """What the API process makes of a prompt; `options` go to the HF processor."""
        images = [item for item in media if isinstance(item, Image.Image)]
        videos = [item for item in media if not isinstance(item, Image.Image)]
        data = {"image": images, "video": videos}
        return self.processor(
            prompt,
            self.processor.info.parse_mm_data(
                {name: items for name, items in data.items() if items}
            ),
            hf_processor_mm_kwargs={"anchorprune": {"budget": budget}, **options},
        )

    def batches(self, *processed: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Modality and arguments of each call of the model, batched as the worker does."""
        items = [
            (modality, item)
            for out in processed
            for modality, of_modality in out["mm_kwargs"].items()
            for item in of_modality
        ]
        for modality, _, kwargs in group_and_batch_mm_kwargs(items, device=self._device):
            yield modality, kwargs

    @torch.inference_mode()
    def embed(self, *processed: Any) -> list[torch.Tensor]:
        """What the worker makes of all media of some processed prompts."""
        return [
            rows
            for _, kwargs in self.batches(*processed)
            for rows in self.model.embed_multimodal(**kwargs)
        ]


def plans_of(processed: Any, modality: str = "image") -> list[ItemPlan]:
    """The plans that travel with the media of a processed prompt."""
    plans = pop_plans(modality, dict(processed["mm_kwargs"].get_data()))
    assert plans is not None
    return plans

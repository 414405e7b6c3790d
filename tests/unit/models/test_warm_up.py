# SPDX-License-Identifier: Apache-2.0
"""What is run and compiled before a server is ready: on vLLM's dummies, or made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from anchorprune_vllm.methods import registry
from anchorprune_vllm.models import pruned_model
from anchorprune_vllm.plan import PlanFields, read_counts
from anchorprune_vllm.selection.kernels import cpu
from anchorprune_vllm.testing.local_model import LocalModel
from anchorprune_vllm.testing.selections import recorded_selections
from tests.support.dialects import in_dialect, prompt_of
from tests.support.pictures import QUESTIONS, picture

pytestmark = pytest.mark.usefixtures("rank")

DEFAULT_BUDGET = 16


def compiled() -> int:
    """Forms of the CPU's kernels that numba has compiled, or read from disk."""
    kernels = [value for value in vars(cpu).values() if hasattr(value, "nopython_signatures")]
    assert kernels
    return sum(len(kernel.nopython_signatures) for kernel in kernels)


def load(path: Path) -> LocalModel:
    """A model whose largest item has a few hundred tokens: Qwen's own limit is 16,384."""
    is_qwen = "qwen2_5_vl" in (path / "config.json").read_text()
    limits: dict[str, Any] = {}
    if is_qwen:
        limits = {"mm_processor_kwargs": {"max_pixels": 28 * 28 * 300}, "max_model_len": 512}
    return LocalModel(path, **limits)


def ask(model: LocalModel, budget: int) -> Any:
    prompt = in_dialect(prompt_of(QUESTIONS[0]), model.processor.info.get_tokenizer())
    return model.process(prompt, picture(1), budget=budget)


def dummies(model: LocalModel, items: int) -> dict[str, Any]:
    """Arguments of vLLM's call when it profiles memory."""
    budget = MultiModalBudget(model.config, MULTIMODAL_REGISTRY, enable_cache=False)
    made = budget.get_dummy_encoder_profile_inputs(max_items_per_batch=items)
    ((_, _, kwargs),) = group_and_batch_mm_kwargs(made)
    return kwargs


def test_profiling_runs_both_ways(any_model: Path) -> None:
    """Two of the largest items, whole and with a question pruned, and nothing is left of them."""
    model = load(any_model)
    pruner = model.model._pruner
    seen: list[int] = []
    tower = getattr(model.model, "vision_tower", None) or model.model.visual
    tower.register_forward_pre_hook(lambda module, args: seen.append(args[0].numel()))
    kwargs = dummies(model, 2)
    given = sum(kwargs[key].numel() for key in kwargs if key.startswith("pixel_values"))
    (modality,) = (name for name in model.model.modalities if PlanFields.of(name).counts in kwargs)
    _, tokens = read_counts(kwargs[PlanFields.of(modality).counts][0])
    with torch.inference_mode():
        model.model.embed_multimodal(**kwargs)  # the general adapter looks at its first item
        seen.clear()
        with recorded_selections(pruner) as selections:
            rows = model.model.embed_multimodal(**kwargs)
    assert [len(item) for item in rows] == [tokens.unpruned] * 2
    assert [len(item.features) for item, _ in selections] == [tokens.candidates] * 2
    assert [len(kept.indices) for _, kept in selections] == [DEFAULT_BUDGET] * 2
    assert all(item.relevance is not None for item, _ in selections)
    assert sum(seen) == 2 * given, "the tower runs once pruned, and once whole"
    assert pruner._cache.used_bytes == 0
    assert pruner.selection_time.read() == (0, 0)


def test_without_profiling_vllm_warms_up_beside_its_own_kernels(any_model: Path) -> None:
    """As with `--skip-mm-profiling`."""
    registry = JitWarmupRegistry(None)
    with registry.activate():  # as vLLM's runners do while they load
        model = load(any_model)
    assert len(registry) == 1
    with recorded_selections(model.model._pruner) as selections:
        registry.warmup()
        assert [len(kept.indices) for _, kept in selections] == [DEFAULT_BUDGET]
        registry.warmup()
        assert len(selections) == 1


@pytest.mark.parametrize("any_model", ["llava-1.5"], indirect=True)
def test_a_request_compiles_nothing(any_model: Path) -> None:
    model = LocalModel(any_model)
    before = compiled()
    assert before
    for budget in (1, 5, 30):
        model.embed(ask(model, budget))
    assert compiled() == before


@pytest.mark.parametrize("any_model", ["llava-1.5"], indirect=True)
def test_selection_is_tried_in_the_state_of_a_request(
    any_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads models with the accelerator and the model's dtype as torch's defaults."""
    states: list[tuple[str, torch.dtype]] = []

    def probe_item(device: torch.device) -> Any:
        states.append((torch.empty(0).device.type, torch.get_default_dtype()))
        return registry.probe_item(device)

    monkeypatch.setattr(pruned_model, "probe_item", probe_item)
    LocalModel(any_model, dtype="bfloat16")
    assert states == [("cpu", torch.float32)]

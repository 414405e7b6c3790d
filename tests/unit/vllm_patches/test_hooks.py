# SPDX-License-Identifier: Apache-2.0
"""A vLLM that lacks a hook: refused with a budget in one line, left alone without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import utils as loader_utils
from vllm.model_executor.models import registry

import anchorprune_vllm
from anchorprune_vllm import models, vllm_patches
from anchorprune_vllm.log import logger
from anchorprune_vllm.testing.demo_models.make import find_text_encoder
from anchorprune_vllm.vllm_patches import Patch, hooks
from anchorprune_vllm.vllm_patches.hooks import HOOKS, TESTED, Hook, HookGone

LLAVA = "LlavaForConditionalGeneration"


def forget_models() -> None:
    registry._try_load_model_cls.cache_clear()
    registry._try_inspect_model_cls.cache_clear()
    loader_utils._MODEL_ARCH_BY_HASH.clear()


@pytest.fixture(autouse=True)
def forgotten_models() -> Iterator[None]:
    """vLLM remembers which class it has loaded: with a hook gone, that is its own."""
    yield
    forget_models()


def start(model: Path, **settings: Any) -> Any:
    """What `vllm serve` and `LLM` do first; without settings: no budget."""
    anchorprune_vllm.register()
    if settings:
        text_encoder = find_text_encoder(model)
        settings |= {"text_encoder": str(text_encoder)} if text_encoder else {}
    overrides = {"anchorprune": settings} if settings else {}
    return EngineArgs(model=str(model), hf_overrides=overrides).create_model_config()


def remove(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    there = hooks.find
    gone = lambda path: None if path == target else there(path)  # noqa: E731
    monkeypatch.setattr(hooks, "find", gone)


def arch_that_needs(hook: Hook) -> str:
    files = {
        "models/qwen2_5_vl.py": "qwen2.5-vl",
        "models/llava/llava_onevision.py": "llava-onevision",
        "models/general/adapter.py": "qwen3-vl",
    }
    return files.get(hook.file, "llava-1.5")


def test_a_hook_that_is_gone(demo_models: Any, subtests: pytest.Subtests) -> None:
    for hook in HOOKS:
        model = demo_models(arch_that_needs(hook))
        words = rf"^anchorprune: vLLM \S+ has no {re.escape(hook.target)}, which pruning needs \("
        with subtests.test(hook=hook.target), pytest.MonkeyPatch.context() as patch:
            remove(patch, hook.target)
            with pytest.raises(ValueError, match=words) as refused:
                start(model, budget=8, positions="native")
            assert "\n" not in str(refused.value)
            start(model)
        forget_models()


def test_models_that_do_not_need_it_are_pruned(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (of_onevision,) = (hook for hook in HOOKS if hook.file == "models/llava/llava_onevision.py")
    remove(monkeypatch, of_onevision.target)
    start(demo_model, budget=8)


def test_compact_positions_need_no_runner(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (of_runner,) = (hook for hook in HOOKS if ":MultiModalPruner" in hook.target)
    remove(monkeypatch, of_runner.target)
    start(demo_model, budget=8)
    with pytest.raises(HookGone, match="MultiModalPruner"):
        start(demo_model, budget=8, positions="native")


class TestModelsInTheWorker:
    """vLLM loads them by the names of its architectures."""

    def test_ours(self) -> None:
        anchorprune_vllm.register()
        assert getattr(models, LLAVA) is models.model_class(LLAVA)
        with pytest.raises(AttributeError, match="has no attribute 'Opt'"):
            _ = models.Opt

    @pytest.mark.parametrize("is_import", [True, False], ids=["import", "hook"])
    def test_vllms_own_if_something_is_gone(
        self, is_import: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.model_executor.models.llava import LlavaForConditionalGeneration

        anchorprune_vllm.register()
        if is_import:
            monkeypatch.setitem(models.ARCHITECTURES, LLAVA, "anchorprune_vllm.models.gone:Gone")
        else:
            remove(monkeypatch, "vllm.multimodal.processing:BaseMultiModalProcessor.apply")
        served = getattr(models, LLAVA)
        assert served.__mro__[1] is LlavaForConditionalGeneration
        assert served._processor_factory is LlavaForConditionalGeneration._processor_factory
        # The API process has refused a budget, if vLLM let us look; else it is refused here.
        config = SimpleNamespace(hf_config=SimpleNamespace(anchorprune={"budget": 8}))
        with pytest.raises(HookGone, match="gone" if is_import else "Processor.apply"):
            served(vllm_config=SimpleNamespace(model_config=config))

    def test_a_model_that_vllm_does_not_know(self, monkeypatch: pytest.MonkeyPatch) -> None:
        anchorprune_vllm.register()
        remove(monkeypatch, "vllm.multimodal.processing:BaseMultiModalProcessor.apply")
        with pytest.raises(HookGone, match=r"Processor\.apply"):
            _ = models.LlavaQwenForCausalLM


@pytest.fixture
def lost_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch whose target is gone, before those that can be applied."""
    gone = Patch(
        **{"owner": "vllm.engine.arg_utils:EngineArgs", "name": "gone", "wrap": str},
        **{"why": "", "until": "", "diff": "", "added": "vllm.engine.arg_utils:not_yet"},
    )
    monkeypatch.setattr(vllm_patches, "PATCHES", (gone, *vllm_patches.PATCHES))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning_once", lambda text, *args: said.append(text % args))
    return said


def test_a_patch_whose_target_is_gone(
    lost_patch: None, demo_model: Path, warnings: list[str]
) -> None:
    start(demo_model)
    (said,) = warnings
    assert "not all of the plugin is in place (anchorprune: vLLM" in said
    assert "EngineArgs.gone, which the plugin extends" in said
    with pytest.raises(HookGone, match=r"has no vllm.engine.arg_utils:EngineArgs\.gone, which the"):
        start(demo_model, budget=8)


class TestVersions:
    def test_an_unknown_one_is_warned_of_once(
        self, demo_model: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in ("0.99.1", "1.0.0+cpu", "0.3.3"):
            monkeypatch.setattr(hooks, "version", lambda name, number=number: number)
            start(demo_model)
            assert warnings == []
            start(demo_model, budget=8)
            tested = "anchorprune: tested with vLLM 0.32, 0.33, not with"
            assert [said.startswith(f"{tested} {number}; ") for said in warnings] == [True]
            warnings.clear()
            forget_models()

    def test_known_ones_are_not(
        self, demo_model: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for tested in TESTED:
            monkeypatch.setattr(hooks, "version", lambda name, tested=tested: f"{tested}.0+cpu")
            start(demo_model, budget=8)
            assert warnings == []
            forget_models()

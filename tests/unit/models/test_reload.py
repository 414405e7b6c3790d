# SPDX-License-Identifier: Apache-2.0
"""New weights for a model that runs: what of ours depends on them goes, the rest stays."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner

from anchorprune_vllm.testing.local_model import LocalModel
from anchorprune_vllm.vllm_patches.encoder_cache import tie_caches, wrap_initialize_from_config


@pytest.fixture(params=["llava-1.5", "llava-onevision"])
def model(demo_models: Any, rank: None, request: pytest.FixtureRequest) -> LocalModel:
    return LocalModel(demo_models(request.param))


def test_the_text_encoder_stays(model: LocalModel, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM says which modules a checkpoint had no weights for: not the whole model's."""

    def state() -> dict[str, tuple[int, torch.Tensor]]:
        buffers = model.model.named_buffers()
        return {n: (b.data_ptr(), b.clone()) for n, b in buffers if n.startswith("anchorprune")}

    before = state()
    assert before, "deep sleep saves buffers: the text encoder must be among them"
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        with set_current_vllm_config(model.config):
            reload_weights(model.config, model.model, None, None, is_checkpoint_format=True)
    finally:
        logger.removeHandler(caplog.handler)
    failed = {line.partition(":")[0] for line in caplog.messages if "Failed to load" in line}
    assert "RotaryEmbedding" in failed  # vLLM's own, pruned or not
    assert not failed & {type(model.model).__name__, "Module"}
    after = state()
    assert after.keys() == before.keys()
    for name, (place, values) in before.items():
        assert after[name][0] == place
        assert torch.equal(after[name][1], values)


class Model:
    """Counts how often it was told."""

    def __init__(self) -> None:
        self.resets = 0

    def reset_encoder_cache(self) -> None:
        self.resets += 1


def first_runner(model: Any) -> Any:
    runner = object.__new__(FirstRunner)
    runner.encoder_cache = {"image": 1}
    runner.late_interaction_runner = SimpleNamespace(clear=lambda: None)
    runner.model = model
    return runner


def second_runner(model: Any) -> Any:
    runner = object.__new__(SecondRunner)
    runner.encoder_cache = runner.pooling_runner = None
    runner.model = model
    return runner


@pytest.mark.parametrize("make_runner", [first_runner, second_runner])
def test_runners_tell_the_model(make_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in kernel format do not go through the model's `load_weights`."""
    runner = make_runner(Model())
    tie_caches(runner)
    runner.reset_encoder_cache()
    assert runner.model.resets == 1
    module = type(runner).__module__
    monkeypatch.setattr(f"{module}.reload_weights", lambda *args, **kwargs: None)
    runner.vllm_config = None
    monkeypatch.setattr(type(runner), "reset_lora_state", lambda self: None)
    monkeypatch.setattr(type(runner), "reset_mm_cache", lambda self: None)
    runner.reload_weights(weights_iterator=iter([]), is_checkpoint_format=False)
    assert runner.model.resets == 2


def test_a_model_that_keeps_nothing_is_left_alone() -> None:
    runner = first_runner(object())
    tie_caches(runner)
    runner.reset_encoder_cache()
    assert runner.encoder_cache == {}


def test_workers_of_another_kind_start(subtests: pytest.Subtests) -> None:
    """The patch is in every worker, with a budget or without."""
    for worker in (
        SimpleNamespace(),
        SimpleNamespace(model_runner=None),
        SimpleNamespace(model_runner=SimpleNamespace()),
        SimpleNamespace(model_runner=SimpleNamespace(get_model=Model)),
    ):
        with subtests.test(worker=worker):
            calls: list[str] = []
            start = wrap_initialize_from_config(
                lambda self, config, calls=calls: calls.append(config)
            )
            start(SimpleNamespace(worker=worker), "config")
            assert calls == ["config"]

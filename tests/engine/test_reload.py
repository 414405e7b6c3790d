# SPDX-License-Identifier: Apache-2.0
"""Whatever tells vLLM that weights have changed, tower outputs of the old ones are forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM

from tests.support.engine import answer, make_engine, request, seen, watch
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference

IMAGE = picture(790)

pytestmark = pytest.mark.parametrize("any_model", ["llava-1.5", "qwen2.5-vl"], indirect=True)


@pytest.fixture(scope="module")
def engine(any_model: Path) -> Iterator[LLM]:
    with make_engine(any_model, 16) as llm:
        watch(llm)
        yield llm


def reload_weights(llm: LLM) -> None:
    llm.collective_rpc("reload_weights")


def reload_kernel_weights(llm: LLM) -> None:
    llm.collective_rpc(_reload_kernel_weights)


def _reload_kernel_weights(worker: Any) -> None:
    model = worker.model_runner.get_model()
    weights = [(name, weight.clone()) for name, weight in model.named_parameters()]
    with torch.inference_mode():
        worker.model_runner.reload_weights(iter(weights), is_checkpoint_format=False)


def reset_encoder_cache(llm: LLM) -> None:
    llm.llm_engine.reset_encoder_cache()


def sleep_and_wake_up(llm: LLM) -> None:
    """There is nothing to free on a CPU, but caches are emptied."""
    llm.sleep(level=1)
    llm.wake_up()


@pytest.mark.parametrize(
    "renew", [reload_weights, reload_kernel_weights, reset_encoder_cache, sleep_and_wake_up]
)
def test_known_images_are_forgotten(
    engine: LLM, reference: Reference, renew: Callable[[LLM], None]
) -> None:
    questions = [request(question, IMAGE) for question in QUESTIONS[:2]]
    before = answer(engine, *questions)
    assert all(engine.collective_rpc(_bytes_of_known_images))
    renew(engine)
    assert engine.collective_rpc(_bytes_of_known_images) == [0]
    # After `reload_weights` vLLM's scheduler, unpruned too, still takes encoder outputs for cached
    # that its workers have dropped.
    engine.reset_prefix_cache()
    engine.llm_engine.reset_encoder_cache()
    seen(engine)
    assert answer(engine, *questions) == before
    assert seen(engine).tower_batches == [reference.tower_size(IMAGE)]


def _bytes_of_known_images(worker: Any) -> int:
    return worker.model_runner.model._pruner._cache.used_bytes

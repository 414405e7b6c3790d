# SPDX-License-Identifier: Apache-2.0
"""Families that the general adapter serves: answers beside vLLM without a budget, and cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from anchorprune_vllm.testing.demo_models.make import make_demo_model
from tests.support.asking import ASKED, Answer, ask
from tests.support.engine import forget_everything, make_engine

FAMILIES = ("qwen3-vl", "glm-4v", "gemma3", "mistral3", "idefics3", "internvl")
"""M-RoPE with and without DeepStack, text around an image, row ends, tags of tiles, and tiles in
one run."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "model"
    make_demo_model(path, arch=request.param)
    return path


def options_of(family: Path) -> dict[str, Any]:
    """Few tokens in a step, so that images are cut between steps: but of Gemma's, whose tokens see
    each other, vLLM cuts none."""
    tokens = 512 if "gemma" in family.parent.name else 96
    return {
        "max_model_len": 2048,
        "limit_mm_per_prompt": {"image": 4},
        "max_num_batched_tokens": tokens,
    }


@pytest.fixture(scope="module")
def unpruned(family: Path) -> dict[str, Answer]:
    with make_engine(family, None, **options_of(family)) as llm:
        return {asked: ask(llm, asked) for asked in ASKED}


@pytest.fixture(scope="module")
def pruned(family: Path, unpruned: dict[str, Answer]) -> Iterator[LLM]:
    with make_engine(family, 12, settings={"feature_cache_mb": 8}, **options_of(family)) as llm:
        yield llm


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("budget", ["100%", 5000])
def test_all_tokens_are_vllms_own_answer(
    pruned: LLM, unpruned: dict[str, Answer], asked: str, budget: int | str
) -> None:
    assert ask(pruned, asked, budget).equals(unpruned[asked])


def test_prompts_get_shorter_by_what_is_cut(pruned: LLM, unpruned: dict[str, Answer]) -> None:
    lengths = [ask(pruned, "two", budget).prompt for budget in (5, 12, "25%")]
    assert lengths == sorted(lengths)
    assert lengths[1] - lengths[0] == 2 * (12 - 5)
    assert lengths[-1] < unpruned["two"].prompt
    assert ask(pruned, "none").prompt == unpruned["none"].prompt


def test_warm_answers_are_cold_ones(pruned: LLM) -> None:
    """Whatever was asked before, about the same images or others, and at other budgets."""
    wanted = [(asked, budget) for asked in ASKED for budget in (12, 5, "25%", "100%")]
    cold = {}
    for each in wanted:
        forget_everything(pruned)
        cold[each] = ask(pruned, *each)
    for each in [*wanted, *reversed(wanted)]:
        assert ask(pruned, *each).equals(cold[each]), each


def test_the_reduced_level_can_be_refused_before_the_engine_is_ready(tmp_path: Path) -> None:
    make_demo_model(tmp_path / "model", arch="granite4-vision")
    words = r"reduced level: .* the setting level is 'full', .* set it to 'any'"
    with (
        pytest.raises(ValueError, match=words),
        make_engine(tmp_path / "model", 12, settings={"level": "full"}, max_model_len=2048),
    ):
        pass


def test_the_full_level_is_not_refused(tmp_path: Path) -> None:
    make_demo_model(tmp_path / "model", arch="cohere2-vision")  # whose order is found at load
    with make_engine(
        tmp_path / "model", 12, settings={"level": "full"}, max_model_len=2048
    ) as engine:
        engine.collective_rpc(assert_order_is_known)


def assert_order_is_known(worker: Any) -> None:
    assert worker.model_runner.model.tower_signals.order is not None

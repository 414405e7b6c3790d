# SPDX-License-Identifier: Apache-2.0
"""Families that the general adapter serves: answers beside vLLM without a budget, and cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image
from vllm import LLM, SamplingParams

from anchorprune_vllm.tools.demo_model import make_demo_model
from tests.support.engine import forget_everything, make_engine
from tests.support.pictures import picture

FAMILIES = ("qwen3-vl", "glm-4v", "gemma3", "mistral3", "idefics3", "internvl")
"""M-RoPE with and without DeepStack, text around an image, row ends, tags of tiles, and tiles in
one run."""
ANSWER = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
SMALL, LARGE = picture(1, (300, 200)), picture(2, (700, 500))
TOLERANCE = 1e-3


def message(*parts: str | Image.Image) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_pil", "image_pil": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


ASKED = {
    "one": message(SMALL, "What color is the circle?"),
    "two": message(SMALL, LARGE, "Where is the red square?"),
    "words between": message(SMALL, "What?", LARGE),
    "same image, other words": message(SMALL, "How many are there?"),
    "none": message("What is this?"),
}


class Answer(NamedTuple):
    prompt: int
    tokens: list[int]
    logprobs: list[float]

    def equals(self, other: Answer) -> bool:
        return self[:2] == other[:2] and self.logprobs == pytest.approx(
            other.logprobs, abs=TOLERANCE
        )


def ask(llm: LLM, asked: str, budget: int | str | None = None) -> Answer:
    override = (
        {} if budget is None else {"mm_processor_kwargs": {"anchorprune": {"budget": budget}}}
    )
    (output,) = llm.chat([ASKED[asked]], ANSWER, use_tqdm=False, **override)
    answer = output.outputs[0]
    best = [max(token.logprob for token in each.values()) for each in answer.logprobs]
    return Answer(len(output.prompt_token_ids), list(answer.token_ids), best)


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

# SPDX-License-Identifier: Apache-2.0
"""Families that the general adapter serves keep what the paper's equations keep.

And with these tokens they answer as transformers does. Prompts are computed 64 tokens at a time, so
that an image may be cut between steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state

from tests.support.dialects import prompt_of
from tests.support.engine import forget_everything, generate, request, seen, watch
from tests.support.layer_inputs import seen_layers, watch_layers
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference
from tests.support.runners import both_runners, engine_on, runners_in_turn
from tests.support.seen_positions import seen_positions, watch_positions

FAMILIES = ("qwen3-vl", "qwen3-vl-moe", "qwen2-vl", "internvl", "gemma3")
BUDGETS = (5, 12, "25%")
TOKENS = 8
TOLERANCE = 1e-3
SHAPES = [(300, 200), (700, 500)]

families = pytest.mark.parametrize("any_model", FAMILIES, indirect=True)


@pytest.fixture(scope="module")
def served(any_model: Path, runner: str) -> Iterator[LLM]:
    # Of Gemma's images, whose tokens see each other, vLLM cuts none between steps.
    step = 512 if any_model.parent.name == "gemma3" else 64
    options = {"max_model_len": 2048, "max_num_batched_tokens": step}
    with groups_with_experts(), engine_on(runner, any_model, 12, **options) as llm:
        watch(llm)
        watch_positions(llm)
        watch_layers(llm)
        yield llm


@contextmanager
def groups_with_experts() -> Iterator[None]:
    """Let models with experts follow others in this process, which have left no group for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "_EP", parallel_state._EP or parallel_state._TP)
        yield


def prompt_for(question: str, images: int) -> str:
    # Without the line's end: behind it vLLM does not find an image of Gemma's.
    return prompt_of(question, images).replace("\n", "")


def pictures(seed: int, count: int) -> list[Image.Image]:
    return [picture(seed + number, SHAPES[number]) for number in range(count)]


def ask(llm: LLM, question: str, images: list[Image.Image], budget: int | str, tokens: int) -> Any:
    """What vLLM gives back when it has seen nothing before, and the tokens it kept."""
    forget_everything(llm)
    for forget in (seen, seen_positions, seen_layers):
        forget(llm)
    asked = request(question, *images, override={"budget": budget})
    asked["prompt"] = prompt_for(question, len(images))
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1)
    (output,) = generate(llm, asked, params=params)
    return output, seen(llm).kept


def number_of(reference: Reference, image: Image.Image, budget: int | str) -> int:
    if isinstance(budget, int):
        return budget
    return int(reference.unpruned(image) * int(budget[:-1]) / 100 + 0.5)


@families
@pytest.mark.parametrize("images", [1, 2])
@runners_in_turn("budget", BUDGETS)
def test_keeps_and_answers_as_the_reference(
    served: LLM, reference: Reference, budget: int | str, images: int
) -> None:
    for seed in (0, 10, 20):
        media, question = pictures(seed, images), QUESTIONS[seed % len(QUESTIONS)]
        output, kept = ask(served, question, media, budget, TOKENS)
        assert kept == [
            reference.kept(image, question, number_of(reference, image, budget)) for image in media
        ]
        prompt = prompt_for(question, images)
        expected = reference.scored_answer(prompt, media, kept, TOKENS)
        answer = output.outputs[0]
        assert list(answer.token_ids) == [token for token, _ in expected]
        scores = [max(token.logprob for token in each.values()) for each in answer.logprobs]
        assert scores == pytest.approx([score for _, score in expected], abs=TOLERANCE)
        _, places = reference.pruned_prompt(prompt, media, kept, TOKENS)
        ((given,),) = seen_positions(served).values()
        assert [list(given[token]) for token in sorted(given)] == places.T[: len(given)].tolist()


@families
@both_runners
def test_layers_get_what_they_get_in_transformers(served: LLM, reference: Reference) -> None:
    """DeepStack's levels too, each of which is added behind a layer of its own."""
    media, question = pictures(30, 2), QUESTIONS[0]
    _, kept = ask(served, question, media, "25%", 1)
    expected = reference.layer_inputs(prompt_for(question, 2), media, kept)
    torch.testing.assert_close(seen_layers(served), expected, atol=TOLERANCE, rtol=TOLERANCE)

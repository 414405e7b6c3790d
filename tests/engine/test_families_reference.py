# SPDX-License-Identifier: Apache-2.0
"""Families that the general adapter serves keep what the paper's equations keep.

And with these tokens they answer as transformers does. Prompts are computed 64 tokens at a time, so
that an image may be cut between steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM

from anchorprune_vllm.testing.tiny_models import TINY_MODELS
from tests.support.engine import forget_everything, seen, watch
from tests.support.families import (
    FAMILIES,
    ask,
    groups_with_experts,
    logprobs_of,
    pictures,
    prompt_for,
)
from tests.support.layer_inputs import seen_layers, watch_layers
from tests.support.pictures import QUESTIONS, clip, picture
from tests.support.reference import Reference
from tests.support.runners import both_runners, engine_on, runners_in_turn
from tests.support.seen_positions import seen_positions, watch_positions

WITH_VIDEOS = (
    *("qwen3-vl", "qwen3-vl-moe", "qwen2-vl", "glm-4v", "glm-4v-moe"),
    *("gemma4", "internvl", "internvl-chat"),
)
BUDGETS = (5, 12, "25%")
TOKENS = 8
TOLERANCE = 1e-3

families = pytest.mark.parametrize("any_model", FAMILIES, indirect=True)


@pytest.fixture(scope="module")
def served(any_model: Path, runner: str) -> Iterator[LLM]:
    family = any_model.parent.name
    options = {
        "max_model_len": 2048,
        # Of Gemma's images, whose tokens see each other, vLLM cuts none between steps.
        "max_num_batched_tokens": 512 if family == "gemma3" else 64,
        "limit_mm_per_prompt": {"image": 2, "video": int(family in WITH_VIDEOS)},
        **TINY_MODELS[family].engine_arguments,
    }
    with groups_with_experts(), engine_on(runner, any_model, 12, **options) as llm:
        watch(llm)
        watch_positions(llm)
        watch_layers(llm)
        yield llm


def number_of(reference: Reference, item: Any, budget: int | str) -> int:
    if isinstance(budget, int):
        return budget
    return int(sum(reference.unit_sizes(item)) * int(budget[:-1]) / 100 + 0.5)


def ask_cold(
    llm: LLM, reference: Reference, question: str, media: list[Any], budget: int | str, tokens: int
) -> tuple[Any, list[list[int]]]:
    """What vLLM gives back when it has seen nothing before, and the tokens it kept."""
    forget_everything(llm)
    for forget in (seen, seen_positions, seen_layers):
        forget(llm)
    output = ask(llm, reference, prompt_for(question, media), media, budget, tokens)
    return output, seen(llm).kept


def compare(
    llm: LLM, reference: Reference, question: str, media: list[Any], budget: int | str
) -> None:
    """Kept tokens, the answer and its probabilities, and the positions of all."""
    output, kept = ask_cold(llm, reference, question, media, budget, TOKENS)
    assert kept == [
        reference.kept(item, question, number_of(reference, item, budget)) for item in media
    ]
    prompt = prompt_for(question, media)
    expected = reference.scored_answer(prompt, media, kept, TOKENS)
    assert list(output.outputs[0].token_ids) == [token for token, _ in expected]
    scores = [score for _, score in expected]
    assert logprobs_of(output) == pytest.approx(scores, abs=TOLERANCE)
    _, places = reference.pruned_prompt(prompt, media, kept, TOKENS)
    ((given,),) = seen_positions(llm).values()
    assert [list(given[token]) for token in sorted(given)] == places.T[: len(given)].tolist()


@families
@pytest.mark.parametrize("images", [1, 2])
@runners_in_turn("budget", BUDGETS)
def test_keeps_and_answers_as_the_reference(
    served: LLM, reference: Reference, budget: int | str, images: int
) -> None:
    for seed in (0, 10, 20):
        question = QUESTIONS[seed % len(QUESTIONS)]
        compare(served, reference, question, pictures(seed, images), budget)


@pytest.mark.parametrize("any_model", WITH_VIDEOS, indirect=True)
@runners_in_turn("budget", (3, 12, "25%"))
def test_videos_as_the_reference(served: LLM, reference: Reference, budget: int | str) -> None:
    """With fewer rows than frames, which may have text between them, not always as long."""
    compare(served, reference, QUESTIONS[1], [clip(1, frames=8, size=(224, 160))], budget)
    # No longer in time than wide: behind such a video transformers counts otherwise than vLLM.
    long = clip(2, frames=12, size=(160, 224), fps=1.0)
    compare(served, reference, QUESTIONS[2], [picture(3, (300, 200)), long], budget)


@families
@both_runners
def test_layers_get_what_they_get_in_transformers(served: LLM, reference: Reference) -> None:
    """DeepStack's levels too, each of which is added behind a layer of its own."""
    media, question = pictures(30, 2), QUESTIONS[0]
    _, kept = ask_cold(served, reference, question, media, "25%", 1)
    expected = reference.layer_inputs(prompt_for(question, media), media, kept)
    torch.testing.assert_close(seen_layers(served), expected, atol=TOLERANCE, rtol=TOLERANCE)

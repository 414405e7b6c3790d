# SPDX-License-Identifier: Apache-2.0
"""The engine keeps what the paper's equations keep, and answers as transformers does."""

from __future__ import annotations

import pytest
from PIL import Image
from vllm import LLM

from tests.support.dialects import prompt_of
from tests.support.engine import GREEDY, answer, request, seen
from tests.support.models import with_videos
from tests.support.pictures import QUESTIONS, clip, picture
from tests.support.reference import Reference
from tests.support.runners import both_runners, runners_in_turn

LONG_QUESTION = "Tell me what is to the left of the tall tree, and then " * 12
BUDGETS = [1, 2, 3, 5, 8, 13, 16, 21, 32, 48, 64, 72, 100, 128, 143]

# Width x height. With crops: all five grids, every way to letterbox, crops of few or no patches.
SHAPES = {
    "one tile": (168, 168),
    "four tiles": (336, 336),
    "larger than all grids": (1000, 1000),
    "1x2": (336, 168),
    "2x1": (168, 336),
    "1x4": (672, 168),
    "4x1": (168, 672),
    "tiny": (5, 3),
    "very wide": (1600, 60),
    "very high": (60, 1600),
    "crops without patches": (1700, 9),
    "two rows of patches": (800, 30),
    "two columns of patches": (30, 800),
    "not divisible, wide": (333, 157),
    "not divisible, high": (211, 317),
}


def check(
    pruned: LLM, reference: Reference, image: Image.Image, question: str, budget: int
) -> None:
    seen(pruned)
    given = answer(pruned, request(question, image, override={"budget": budget}))[0]
    kept = seen(pruned).kept
    assert kept == [reference.kept(image, question.strip(), budget)]
    assert given == reference.answer(prompt_of(question), [image], kept, GREEDY.max_tokens)


@runners_in_turn("budget", BUDGETS)
def test_keeps_what_the_paper_keeps(pruned: LLM, reference: Reference, budget: int) -> None:
    for seed in (budget, 200 + budget):
        check(pruned, reference, picture(seed), QUESTIONS[seed % len(QUESTIONS)], budget)


@both_runners
def test_question_of_many_segments(pruned: LLM, reference: Reference) -> None:
    check(pruned, reference, picture(99), LONG_QUESTION, 32)


@runners_in_turn("shape", SHAPES)
def test_shapes(pruned: LLM, reference: Reference, shape: str) -> None:
    """At budgets below the number of units, that divide by it or not, and above small units."""
    image = picture(len(shape), SHAPES[shape])
    sizes = reference.unit_sizes(image)
    budgets = [1, 2, len(sizes) - 1, 16, 37, 10 * len(sizes), min(sizes) + 1, sum(sizes) - 1]
    most = min(sum(sizes), 750)  # the reference is slow
    for number, budget in enumerate(sorted({b for b in budgets if 0 < b < most})):
        check(pruned, reference, image, QUESTIONS[number % len(QUESTIONS)], budget)


@with_videos
@pytest.mark.parametrize("frames", [1, 2, 9])
@pytest.mark.parametrize("budget", [1, 5, 35])
@both_runners
def test_videos(pruned: LLM, reference: Reference, frames: int, budget: int) -> None:
    """At budgets below the number of frames, and above."""
    video, question = clip(frames, frames=frames), QUESTIONS[frames % len(QUESTIONS)]
    seen(pruned)
    given = answer(pruned, request(question, video, override={"budget": budget}))[0]
    kept = seen(pruned).kept
    assert kept == [reference.kept(video, question, budget)]
    assert given == reference.answer(prompt_of(question, 0, 1), [video], kept, GREEDY.max_tokens)

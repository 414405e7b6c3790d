# SPDX-License-Identifier: Apache-2.0
"""The engine keeps what the paper's equations keep, and answers as transformers does."""

from __future__ import annotations

import pytest
from vllm import LLM

from tests.support.engine import answer, prompt_of, request, seen
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import ReferenceLlava

LONG_QUESTION = "Tell me what is to the left of the tall tree, and then " * 12
CASES = [
    (seed, QUESTIONS[seed % len(QUESTIONS)], budget)
    for seed, budget in enumerate([1, 2, 3, 5, 8, 13, 16, 21, 32, 48, 64, 72, 100, 128, 143] * 2)
]


@pytest.mark.parametrize(("seed", "question", "budget"), [*CASES, (99, LONG_QUESTION, 32)])
def test_keeps_what_the_paper_keeps(
    pruned: LLM, reference: ReferenceLlava, seed: int, question: str, budget: int
) -> None:
    image = picture(seed)
    seen(pruned)
    given = answer(pruned, request(question, image, override={"budget": budget}))[0]
    kept = seen(pruned).kept
    assert kept == [reference.kept(image, question.strip(), budget)]
    assert given == reference.answer(prompt_of(question), [image], kept, 12)

# SPDX-License-Identifier: Apache-2.0
"""Chunks, batches and ranks change nothing in what is kept and answered."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.support.dialects import prompt_of
from tests.support.engine import GREEDY, answer, forget_everything, generate, request, seen
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference
from tests.support.runners import both_runners
from tests.support.scheduling import SIZES, check_alone, check_ranks, many_requests


@both_runners
def test_64_at_once_are_the_same_as_one_by_one(pruned: LLM) -> None:
    check_alone(pruned, many_requests(64))


@both_runners
def test_chunk_boundary_inside_the_image(pruned: LLM, reference: Reference) -> None:
    """An engine that computes 64 tokens at a time needs several steps for 100 visual ones."""
    images = [picture(340 + i) for i in range(6)]
    asked = [
        request(QUESTIONS[i], image, override={"budget": 100}) for i, image in enumerate(images)
    ]
    expected = []
    for i, image in enumerate(images):
        kept = reference.kept(image, QUESTIONS[i], 100)
        expected.append(
            reference.answer(prompt_of(QUESTIONS[i]), [image], [kept], GREEDY.max_tokens)
        )
    assert answer(pruned, *asked) == expected


@both_runners
def test_a_step_runs_no_more_of_the_tower_than_unpruned(
    pruned: LLM, plugin_off: LLM, reference: Reference
) -> None:
    requests = [request(QUESTIONS[i % 8], picture(400 + i)) for i in range(64)]
    one_token = SamplingParams(max_tokens=1)
    seen(plugin_off)
    generate(plugin_off, *requests, params=one_token)
    unpruned = seen(plugin_off).tower_batches

    budgeted = [
        {**item, "mm_processor_kwargs": {"anchorprune": {"budget": 8}}} for item in requests
    ]
    forget_everything(pruned)
    seen(pruned)
    generate(pruned, *budgeted, params=one_token)
    after = seen(pruned)
    images = max(unpruned) // reference.tower_size(picture(400))
    assert max(after.embed_calls) <= images  # one call in each step
    assert max(after.tower_batches) <= max(unpruned)
    assert sum(after.tower_batches) == sum(unpruned)


def test_tensor_parallel(tensor_parallel: LLM, pruned: LLM, mixed: list[dict[str, Any]]) -> None:
    check_ranks(tensor_parallel, pruned, [*many_requests(16), *mixed])


@pytest.mark.parametrize("any_model", ["qwen2.5-vl"], indirect=True)
def test_data_parallel_tower(
    data_parallel_tower: LLM, pruned: LLM, mixed: list[dict[str, Any]]
) -> None:
    # Several images in one call, and one alone: then a rank has none.
    several = request(QUESTIONS[0], *(picture(350 + i, SIZES[i % len(SIZES)]) for i in range(5)))
    check_ranks(data_parallel_tower, pruned, [several, *mixed])

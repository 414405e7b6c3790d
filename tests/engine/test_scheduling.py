# SPDX-License-Identifier: Apache-2.0
"""Chunks, batches and ranks change nothing in what is kept and answered."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.support.dialects import prompt_of
from tests.support.engine import GREEDY, answer, forget_everything, generate, request, seen
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference
from tests.support.runners import both_runners

SIZES = [(168, 168), (336, 336), (450, 150), (30, 90)]


def many_requests(count: int) -> list[dict[str, Any]]:
    """Images new and shared, none to three per prompt, all kinds of sizes and budgets."""
    rng = random.Random(0)
    requests = []
    for _ in range(count):
        seeds = [rng.randrange(300, 330) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
        images = [picture(seed, SIZES[seed % len(SIZES)]) for seed in seeds]
        override = rng.choice([None, {"budget": rng.randrange(1, 144)}, {"budget": "100%"}])
        if not images:
            override = None
        requests.append(request(rng.choice(QUESTIONS), *images, override=override))
    return requests


@both_runners
def test_64_at_once_are_the_same_as_one_by_one(pruned: LLM) -> None:
    requests = many_requests(64)
    short = SamplingParams(temperature=0, max_tokens=4)  # the second runner is slow here
    forget_everything(pruned)
    together = [list(one.outputs[0].token_ids) for one in generate(pruned, *requests, params=short)]
    forget_everything(pruned)
    for item, given in zip(requests, together, strict=True):
        (alone,) = generate(pruned, item, params=short)
        assert list(alone.outputs[0].token_ids) == given


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


def check_ranks(parallel: LLM, alone: LLM, requests: list[dict[str, Any]]) -> None:
    """Same answers and, on every rank, same kept tokens as with one rank.

    They are asked together: each step of two ranks on busy cores takes long.
    """
    forget_everything(alone)
    seen(alone)
    answers = answer(alone, *requests)
    kept = sorted(seen(alone).kept)
    assert answer(parallel, *requests) == answers
    assert parallel.collective_rpc(take_kept) == [kept, kept]


def take_kept(worker: Any) -> list[list[int]]:
    """What was kept of all items, whatever the order in which they were scheduled."""
    return sorted(worker.anchorprune_seen.kept)

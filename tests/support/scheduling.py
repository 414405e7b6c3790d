# SPDX-License-Identifier: Apache-2.0
"""Many requests at once, and checks that neither batches nor ranks change what is answered."""

from __future__ import annotations

import random
from typing import Any

from vllm import LLM, SamplingParams

from tests.support.engine import answer, forget_everything, generate, request, seen
from tests.support.pictures import QUESTIONS, picture

SIZES = [(168, 168), (336, 336), (450, 150), (30, 90)]


def many_requests(count: int) -> list[dict[str, Any]]:
    """Draw requests with none to three images, new and shared, of several sizes and budgets."""
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


def check_alone(llm: LLM, requests: list[dict[str, Any]]) -> None:
    """Check that requests made at once have the same answers as one by one."""
    short = SamplingParams(temperature=0, max_tokens=4)  # the second runner is slow here
    forget_everything(llm)
    together = [list(one.outputs[0].token_ids) for one in generate(llm, *requests, params=short)]
    forget_everything(llm)
    for item, given in zip(requests, together, strict=True):
        (alone,) = generate(llm, item, params=short)
        assert list(alone.outputs[0].token_ids) == given


def check_ranks(parallel: LLM, alone: LLM, requests: list[dict[str, Any]]) -> None:
    """Check answers and, on every rank, kept tokens: the same as with one rank.

    They are asked together: each step of two ranks on busy cores takes long.
    """
    forget_everything(alone)
    seen(alone)
    answers = answer(alone, *requests)
    kept = sorted(seen(alone).kept)
    assert answer(parallel, *requests) == answers
    assert parallel.collective_rpc(take_kept) == [kept, kept]


def take_kept(worker: Any) -> list[list[int]]:
    """Return what a worker kept of all items, whatever the order of scheduling."""
    return sorted(worker.anchorprune_seen.kept)

# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding changes no answer: whichever positions, model runner and scheduling.

Drafts are guessed from what was said before (ngram). A model without training repeats itself after
some words, so that both right and wrong drafts occur.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.engine import generate, media_of, request
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference
from tests.support.runners import engine_on
from tests.support.seen_positions import Call, seen_calls, watch_positions

BUDGET, LENGTH, WORDS = 16, 24, "What is on the left?"

# Under asynchronous scheduling, drafts are made on the device.
each_way = pytest.mark.parametrize(
    ("runner", "method"), [("V1", "ngram"), ("V2", "ngram_gpu")], indirect=["runner"]
)


@each_way
def test_native_positions(any_model: Path, reference: Reference, runner: str, method: str) -> None:
    check(any_model, reference, runner, "native", method)


@pytest.mark.parametrize("any_model", ["llava-1.5"], indirect=True)
def test_compact_positions(any_model: Path, reference: Reference) -> None:
    check(any_model, reference, "V2", "compact", "ngram_gpu")


@pytest.mark.parametrize("any_model", ["qwen2.5-vl"], indirect=True)
def test_the_second_runner_without_asynchronous_scheduling(
    any_model: Path, reference: Reference
) -> None:
    check(any_model, reference, "V2", "native", "ngram", is_asynchronous=False)


def check(
    model: Path,
    reference: Reference,
    on: str,
    positions: str,
    method: str,
    *,
    is_asynchronous: bool | None = None,
) -> None:
    if is_asynchronous is None:
        is_asynchronous = on == "V2"
    prompts = [
        request(QUESTIONS[0], picture(800)),
        request(QUESTIONS[1], picture(801, (400, 150)), picture(802)),
        request(QUESTIONS[2]),
        request(QUESTIONS[3], picture(803, (90, 300))),
    ]
    override = {"mm_processor_kwargs": {"anchorprune": {"query": WORDS}}}
    speculation = {
        **{"method": method, "num_speculative_tokens": 3},
        **{"prompt_lookup_max": 3, "prompt_lookup_min": 1},
    }
    with engine_on(
        on,
        model,
        BUDGET,
        settings={"positions": positions},
        speculative_config=speculation,
        async_scheduling=is_asynchronous,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        max_model_len=512,
    ) as llm:
        assert llm.collective_rpc(is_scheduled_asynchronously) == [is_asynchronous]
        watch_positions(llm)
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        outputs = generate(llm, *({**item, **override} for item in prompts), params=params)
        calls = seen_calls(llm)
    for item, output in zip(prompts, outputs, strict=True):
        media = media_of(item)
        kept = [reference.kept(one, WORDS, BUDGET) for one in media]
        native = positions == "native"
        expected = reference.answer(item["prompt"], media, kept, LENGTH, native=native)
        given = list(output.outputs[0].token_ids)
        assert given[: len(expected)] == expected
        if native:
            check_positions(
                [call for call in calls if call[0].startswith(output.request_id)],
                reference.native_positions(item["prompt"], media, kept, LENGTH).T.tolist(),
            )
    assert_some_drafts_were_right_and_some_wrong(calls)


def is_scheduled_asynchronously(worker: Any) -> bool:
    return worker.vllm_config.scheduler_config.async_scheduling


def check_positions(calls: list[Call], expected: list[list[int]]) -> None:
    """The last drafts may reach beyond the answer, and so beyond what is expected."""
    assert calls
    for _, first, columns in calls:
        for wanted, position in zip(expected[first:], columns, strict=False):
            # transformers has one channel for a LLaVA, vLLM three that are equal.
            assert position == wanted * (len(position) // len(wanted))


def assert_some_drafts_were_right_and_some_wrong(calls: list[Call]) -> None:
    """A draft that is wrong is computed again; without drafts, each answer takes LENGTH calls."""
    by_request: dict[str, list[tuple[int, int]]] = {}
    for name, first, columns in calls:
        by_request.setdefault(name, []).append((first, first + len(columns)))
    advanced = [
        later[0] - earlier[0]
        for parts in by_request.values()
        for earlier, later in pairwise(parts)
        if later[0] < earlier[1]
    ]
    assert advanced, "no draft was wrong"
    assert max(advanced) > 1, "no draft was right"

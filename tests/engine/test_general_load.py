# SPDX-License-Identifier: Apache-2.0
"""Families that the general adapter serves, under load: batches, ranks, HTTP, the second runner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from vllm import LLM

from anchorprune_vllm.metrics.families import (
    FALLBACKS,
    ITEMS_PRUNED,
    SELECTIONS,
    TOKENS_AFTER,
    TOKENS_BEFORE,
)
from anchorprune_vllm.testing.server import VllmServer
from tests.support.asking import ask
from tests.support.chats import chat, client_of, user
from tests.support.engine import forget_everything, watch
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference
from tests.support.runners import engine_on
from tests.support.scheduling import check_alone, check_ranks, many_requests
from tests.support.scrapes import Scrape

DEEPSTACK, WITH_SHARES, CLASS_TOKEN = "qwen3-vl", "idefics3", "internvl-chat"

of_deepstack = pytest.mark.parametrize("any_model", [DEEPSTACK], indirect=True)


@pytest.fixture(scope="module")
def served(any_model: Path, runner: str) -> Iterator[LLM]:
    # Steps that cut images, and take in several.
    options = {"max_model_len": 2048, "max_num_batched_tokens": 256}
    with engine_on(runner, any_model, 16, **options) as llm:
        yield llm


@pytest.mark.parametrize("any_model", [DEEPSTACK, WITH_SHARES], indirect=True)
def test_64_at_once_are_the_same_as_one_by_one(served: LLM) -> None:
    check_alone(served, many_requests(64))


@pytest.mark.parametrize("any_model", [DEEPSTACK, CLASS_TOKEN], indirect=True)
def test_tensor_parallel(tensor_parallel: LLM, served: LLM, mixed: list[dict[str, Any]]) -> None:
    watch(served)
    check_ranks(tensor_parallel, served, [*many_requests(8), *mixed])


@pytest.mark.parametrize(("any_model", "runner"), [(DEEPSTACK, "V2")], indirect=True)
def test_warm_answers_are_cold_ones_on_the_second_runner(served: LLM) -> None:
    questions = ("one", "two", "same image, other words")
    wanted = [(asked, budget) for asked in questions for budget in (5, "25%")]
    cold = {}
    for each in wanted:
        forget_everything(served)
        cold[each] = ask(served, *each)
    for each in reversed(wanted):
        assert ask(served, *each).equals(cold[each]), each


@of_deepstack
def test_budgets_over_http(server: VllmServer, reference: Reference) -> None:
    """A request's own, and one that is refused: the server lives, and counts what it served."""
    client, message = client_of(server), user(QUESTIONS[0], 600)
    unpruned = reference.unpruned(picture(600))
    before = Scrape.from_server(server.url)
    default, five, whole = (
        chat(client, message, override=override).usage.prompt_tokens
        for override in (None, {"budget": 5}, {"budget": "100%"})
    )
    assert (default - five, whole - five) == (16 - 5, unpruned - 5)
    with pytest.raises(BadRequestError) as error:
        chat(client, message, override={"budget": 0})
    assert "Budget 0 is not allowed" in error.value.message
    assert chat(client, message).usage.prompt_tokens == default
    after = Scrape.from_server(server.url)
    grown = {
        family: after.value(family, **labels) - before.value(family, **labels)
        for family, labels in (
            *((family, {}) for family in (TOKENS_BEFORE, TOKENS_AFTER, ITEMS_PRUNED, SELECTIONS)),
            (FALLBACKS, {"reason": "all_kept"}),
        )
    }
    assert grown == {
        TOKENS_BEFORE: 4 * unpruned,
        TOKENS_AFTER: 16 + 5 + unpruned + 16,
        ITEMS_PRUNED: 3,
        SELECTIONS: 2,  # the last request has the first one's embeddings
        FALLBACKS: 1,
    }

# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5, whose layers of linear attention carry a state from token to token.

On a CPU vLLM has them in bfloat16 alone. What it keeps is compared in float32, without an engine
(tests/unit/models/test_reference.py); here, its positions, and what it makes of the kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM

from anchorprune_vllm.testing.tiny_models import TINY_MODELS
from tests.support.engine import forget_everything, make_engine, seen, watch
from tests.support.families import (
    LINEAR_ATTENTION,
    ask,
    groups_with_experts,
    logprobs_of,
    pictures,
    prompt_for,
)
from tests.support.pictures import QUESTIONS, clip
from tests.support.reference import Reference
from tests.support.seen_positions import seen_positions, watch_positions

TOKENS = 8
IN_BFLOAT16 = 0.2
BLOCK = 96  # of the prefix cache: as many tokens as the state of a layer takes the room of
VIDEO, LONG = clip(1, frames=8, size=(224, 160)), clip(2, frames=22, size=(160, 224))
ASKED: dict[str, tuple[list[Any], int]] = {
    "image": (pictures(0, 1), 40),
    "two images": (pictures(10, 2), 40),
    "two images, few tokens": (pictures(20, 2), 5),
    "video": ([VIDEO], 12),
    "image and video": ([*pictures(30, 1), LONG], 40),
}

asked = pytest.mark.parametrize("asked", ASKED)
both = pytest.mark.parametrize("any_model", LINEAR_ATTENTION, indirect=True)


@pytest.fixture(scope="module")
def served(any_model: Path) -> Iterator[LLM]:
    options = {
        "max_model_len": 2048,
        "max_num_batched_tokens": 64,
        "limit_mm_per_prompt": {"image": 2, "video": 1},
        "enable_prefix_caching": True,
        **TINY_MODELS[any_model.parent.name].engine_arguments,
    }
    with groups_with_experts(), make_engine(any_model, 12, **options) as llm:
        watch(llm)
        watch_positions(llm)
        yield llm


def ask_cold(llm: LLM, reference: Reference, prompt: str, asked: str) -> tuple[Any, Any]:
    forget_everything(llm)
    for forget in (seen, seen_positions):
        forget(llm)
    return ask(llm, reference, prompt, *ASKED[asked], TOKENS), seen(llm).kept


@both
@asked
def test_positions_are_those_of_the_unpruned_prompt(
    served: LLM, reference: Reference, asked: str
) -> None:
    media, budget = ASKED[asked]
    prompt = prompt_for(QUESTIONS[0], media)
    _, kept = ask_cold(served, reference, prompt, asked)
    assert [len(indices) for indices in kept] == [budget] * len(media)
    _, places = reference.pruned_prompt(prompt, media, kept, TOKENS)
    ((given,),) = seen_positions(served).values()
    assert [list(given[token]) for token in sorted(given)] == places.T[: len(given)].tolist()


@pytest.mark.parametrize("any_model", ["qwen3.5"], indirect=True)  # experts follow from near-ties
@asked
def test_answers_as_transformers_does(served: LLM, reference: Reference, asked: str) -> None:
    """As far as bfloat16 goes: the probabilities of each token, and no better one instead."""
    media, _ = ASKED[asked]
    prompt = prompt_for(QUESTIONS[1], media)
    output, kept = ask_cold(served, reference, prompt, asked)
    answer = list(output.outputs[0].token_ids)
    scores = reference.scores(prompt, media, kept, answer)
    given = scores[torch.arange(len(answer)), answer]
    assert logprobs_of(output) == pytest.approx(given.tolist(), abs=IN_BFLOAT16)
    assert float((scores.max(dim=1).values - given).max()) < IN_BFLOAT16


@both
@asked
def test_a_cached_state_is_gone_on_from(served: LLM, reference: Reference, asked: str) -> None:
    """Asked again, asked again after others, and as the first turn of a conversation."""
    prompt = prompt_for(" ".join(QUESTIONS * 2), ASKED[asked][0])
    longer = f"{prompt} Red. USER: And why? ASSISTANT:"
    cold_longer, _ = ask_cold(served, reference, longer, asked)
    cold, _ = ask_cold(served, reference, prompt, asked)
    assert cold.num_cached_tokens == cold_longer.num_cached_tokens == 0

    again = ask(served, reference, prompt, *ASKED[asked], TOKENS)
    ask_others(served, reference)
    after_others = ask(served, reference, prompt, *ASKED[asked], TOKENS)
    next_turn = ask(served, reference, longer, *ASKED[asked], TOKENS)
    for warm, expected in [(again, cold), (after_others, cold), (next_turn, cold_longer)]:
        assert warm.num_cached_tokens >= BLOCK
        assert_same(warm, expected)


@both
@pytest.mark.parametrize("asked", ["image", "video"])  # several come to other steps if known
def test_known_media_answer_as_new_ones(served: LLM, reference: Reference, asked: str) -> None:
    """From the tower's outputs that were kept, with all of the prompt computed anew."""
    prompt = prompt_for(QUESTIONS[4], ASKED[asked][0])
    cold, kept = ask_cold(served, reference, prompt, asked)
    forget_everything(served)
    ask_others(served, reference)
    seen(served)
    warm = ask(served, reference, prompt, *ASKED[asked], TOKENS)
    after = seen(served)
    assert (after.tower_batches, after.kept, warm.num_cached_tokens) == ([], kept, 0)
    assert_same(warm, cold)


def ask_others(llm: LLM, reference: Reference) -> None:
    for media, budget in ASKED.values():
        ask(llm, reference, prompt_for(QUESTIONS[2], media), media, budget, TOKENS)


def assert_same(warm: Any, cold: Any) -> None:
    assert list(warm.outputs[0].token_ids) == list(cold.outputs[0].token_ids)
    assert logprobs_of(warm) == pytest.approx(logprobs_of(cold), abs=1e-3)

# SPDX-License-Identifier: Apache-2.0
"""Methods through the engine: what they keep of the reference's signals, and the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.methods.registry import method_of
from anchorprune_vllm.selection import Candidates, KeptTokens
from tests.support.dialects import prompt_of
from tests.support.engine import GREEDY, answer, make_engine, request, seen, watch
from tests.support.models import with_videos
from tests.support.pictures import QUESTIONS, clip, picture
from tests.support.reference import Reference


@torch.inference_mode()
def kept_by(
    reference: Reference, media: Any, question: str, budget: int, settings: dict[str, Any]
) -> KeptTokens:
    """What a method keeps of a media as transformers sees it."""
    tokens = reference._tokens(media)
    keys, received = reference.method_signals(media)
    method = method_of(PruneConfig.from_dict({"budget": budget, **settings}))
    relevance = torch.from_numpy(reference._relevance(tokens, question))
    item = Candidates(
        relevance=relevance if method.uses_query else None,
        features=torch.from_numpy(tokens.features),
        importance=torch.from_numpy(tokens.importance),
        budget=budget,
        context_features=torch.from_numpy(tokens.context),
        units=torch.from_numpy(tokens.units),
        projected=reference.embed(media),
        keys=keys,
        object_attention=received,
        grids=reference.grids(media),
    )
    return method.select([item])[0]


def check(model: Path, reference: Reference, settings: dict[str, Any], *prompts: Any) -> None:
    with make_engine(model, 16, settings=settings) as llm:
        watch(llm)
        for question, media, budget in prompts:
            asked = request(question, media, override={"budget": budget})
            (given,) = answer(llm, asked)
            (indices,) = seen(llm).kept
            kept = kept_by(reference, media, question, budget, settings)
            assert indices == kept.indices.tolist()
            prompt = prompt_of(question, *((0, 1) if isinstance(media, tuple) else (1,)))
            native = reference.is_native or settings.get("positions") == "native"
            assert given == reference.answer_with(
                prompt, media, kept, GREEDY.max_tokens, native=native
            )


PICTURES = [
    (QUESTIONS[1], picture(1), 1),
    (QUESTIONS[2], picture(2, (333, 157)), 16),
    (QUESTIONS[3], picture(3, (150, 400)), 37),
]


def test_merged_tokens(any_model: Path, reference: Reference) -> None:
    """Each row has the position of the token that it grew around."""
    check(any_model, reference, {"method": "visionzip", "positions": "native"}, *PICTURES)


@pytest.mark.parametrize("any_model", ["llava-1.5", "qwen2.5-vl"], indirect=True)
@pytest.mark.parametrize("method", ["visionzip", "hiprune", "cdpruner"])
def test_methods_that_together_ask_for_all_signals(
    any_model: Path, reference: Reference, method: str
) -> None:
    """The signals of all models are compared without an engine, and all methods rehearsed."""
    check(any_model, reference, {"method": method}, *PICTURES)


@with_videos
def test_videos(any_model: Path, reference: Reference) -> None:
    check(any_model, reference, {"method": "visionzip"}, (QUESTIONS[4], clip(7, frames=5), 23))


@pytest.mark.parametrize("any_model", ["llava-1.5", "qwen2.5-vl"], indirect=True)
def test_order_of_selection(any_model: Path, reference: Reference) -> None:
    check(any_model, reference, {"order": "selection", "stage2": "additive"}, *PICTURES)


@pytest.mark.parametrize("any_model", ["llava-1.5"], indirect=True)
def test_raw_similarity(any_model: Path, reference: Reference, monkeypatch: Any) -> None:
    negated = reference._relevance
    monkeypatch.setattr(reference, "_relevance", lambda *args: -negated(*args))
    check(any_model, reference, {"similarity": "raw"}, *PICTURES)


@pytest.mark.parametrize("any_model", ["qwen2.5-vl"], indirect=True)
def test_mean_matching(any_model: Path, reference: Reference, monkeypatch: Any) -> None:
    def mean_match(tokens: Any, question: str) -> Any:
        return reference._matches(tokens, question).mean(axis=1)

    monkeypatch.setattr(reference, "_relevance", mean_match)
    check(any_model, reference, {"matching": "mean"}, *PICTURES)


@pytest.mark.parametrize("any_model", ["llava-1.5"], indirect=True)
def test_without_a_question_all_questions_share_the_tokens(any_model: Path) -> None:
    """Also in vLLM's caches: for a second question, nothing is encoded or chosen."""
    for method, is_shared in (("random", True), ("cdpruner", False)):
        with make_engine(any_model, 16, settings={"method": method}) as llm:
            watch(llm)
            answer(llm, request(QUESTIONS[0], picture(1)))
            first = seen(llm)
            assert len(first.kept) == len(first.embed_calls) == 1
            answer(llm, request(QUESTIONS[1], picture(1)))
            assert (seen(llm).embed_calls == []) == is_shared
            answer(llm, request(QUESTIONS[1], picture(2)))
            assert seen(llm).kept != first.kept

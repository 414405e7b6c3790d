# SPDX-License-Identifier: Apache-2.0
"""LLaVA-Video on the engine, against SigLIP and Qwen2 in transformers and the original's rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM

from anchorprune_vllm.testing.demo_models.make import make_demo_model
from tests.support.dialects import prompt_of
from tests.support.engine import GREEDY, answer, make_engine, request, seen, watch
from tests.support.pictures import QUESTIONS, clip
from tests.support.reference import reference_of

# Each way to pool and each place for newlines; all pairs of them are tried without an engine.
LAYOUTS = (("average", "grid"), ("max", "frame"), ("bilinear", "one_token"), ("max", "no_token"))


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the real one, it has an odd number of patches in a row: 7, pooled to 3 or 4."""
    path = tmp_path_factory.mktemp("odd") / "model"
    make_demo_model(path, arch="llava-video", image_size=98)
    return path


@pytest.mark.parametrize(("pool", "newline"), LAYOUTS)
def test_unpruned(odd_model: Path, pool: str, newline: str) -> None:
    settings = {"mm_spatial_pool_mode": pool, "mm_newline_position": newline}
    reference: Any = reference_of(odd_model)
    reference.settings.update(settings)
    video, question = clip(1, frames=5, size=(150, 120)), QUESTIONS[4]
    with make_engine(odd_model, None, hf_overrides=settings) as llm:
        llm.collective_rpc(record_outputs)
        (given,) = answer(llm, request(question, video))
        (outputs,) = llm.collective_rpc(take_outputs)
    with torch.inference_mode():
        rows = reference.embed_prompt(prompt_of(question, 0, 1), [reference.embed_unpruned(video)])
        for token, states in zip(given, outputs, strict=True):
            expected = reference.hidden_states(rows, torch.arange(rows.shape[1])[None])
            # The whole prompt at first, then one token at a time.
            torch.testing.assert_close(states, expected[-len(states) :], rtol=1e-3, atol=1e-3)
            assert token == int(reference.lm_head(expected[-1]).argmax())
            rows = torch.cat([rows, reference.embed_words(torch.tensor([[token]]))], dim=1)
    assert len(outputs[0]) > 5 * 9


def record_outputs(worker: Any) -> None:
    worker.anchorprune_outputs = []
    worker.model_runner.model.register_forward_hook(
        lambda module, args, output: worker.anchorprune_outputs.append(output.clone())
    )


def take_outputs(worker: Any) -> list[torch.Tensor]:
    return worker.anchorprune_outputs


@pytest.fixture(scope="module")
def papers_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """27 x 27 patches, averaged to 13 x 13: 2,704 tokens in 16 frames."""
    path = tmp_path_factory.mktemp("paper") / "model"
    make_demo_model(path, arch="llava-video", image_size=378)
    return path


@pytest.fixture(scope="module")
def papers_reference(papers_model: Path) -> Any:
    return reference_of(papers_model)


@pytest.fixture(scope="module")
def papers_engine(papers_model: Path) -> Iterator[LLM]:
    with make_engine(papers_model, 512, max_model_len=8192) as llm:
        watch(llm)
        yield llm


@pytest.mark.parametrize(
    ("frames", "budgets"),
    [(1, (1, 37, 168)), (4, (3, 100)), (16, (512, 1024, 15, 333)), (33, (512, 32, 1000))],
)
def test_kept(
    papers_engine: LLM, papers_reference: Any, frames: int, budgets: tuple[int, ...]
) -> None:
    video, question = clip(frames, frames=frames), QUESTIONS[frames % len(QUESTIONS)]
    assert sum(papers_reference.unit_sizes(video)) == frames * 169
    for budget in budgets:
        seen(papers_engine)
        given = answer(papers_engine, request(question, video, override={"budget": budget}))[0]
        (kept,) = seen(papers_engine).kept
        assert kept == papers_reference.kept(video, question, budget)
        # Frame after frame, and in each of them row after row.
        assert kept == sorted(kept)
        expected = papers_reference.answer(
            prompt_of(question, 0, 1), [video], [kept], GREEDY.max_tokens
        )
        assert given == expected

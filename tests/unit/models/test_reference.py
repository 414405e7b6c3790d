# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 in float32, which its language model does not have on a CPU: so without an engine.

What is made of the tokens kept, and their positions: tests/engine/test_linear_attention.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anchorprune_vllm.testing.local_model import LocalModel
from anchorprune_vllm.testing.selections import recorded_selections
from tests.support.dialects import in_dialect
from tests.support.families import LINEAR_ATTENTION, prompt_for
from tests.support.pictures import QUESTIONS, clip, picture
from tests.support.reference import Reference

MEDIA = {
    "small": picture(1, (300, 200)),
    "large": picture(2, (700, 500)),
    "video": clip(1, frames=8, size=(224, 160)),
    "long video": clip(2, frames=22, size=(160, 224)),
}

both = pytest.mark.parametrize("any_model", LINEAR_ATTENTION, indirect=True)
media = pytest.mark.parametrize("item", MEDIA.values(), ids=MEDIA)


@pytest.fixture(scope="module")
def local(any_model: Path, rank: None) -> LocalModel:
    return LocalModel(any_model, max_model_len=2048, limit_mm_per_prompt={"image": 2, "video": 1})


def process(local: LocalModel, question: str, item: Any, budget: int | str) -> Any:
    tokenizer = local.processor.info.get_tokenizer()
    prompt = in_dialect(prompt_for(question, [item]), tokenizer)
    return local.process(prompt, item, budget=budget)


@both
@media
def test_rows_are_those_of_transformers(local: LocalModel, reference: Reference, item: Any) -> None:
    (rows,) = local.embed(process(local, QUESTIONS[0], item, "100%"))
    expected = reference.embed(item)
    width = expected.shape[1]  # behind it are positions
    torch.testing.assert_close(rows[:, :width], expected, atol=1e-4, rtol=1e-4)


@both
@media
@torch.inference_mode()
def test_keeps_what_the_reference_keeps(local: LocalModel, reference: Any, item: Any) -> None:
    for question, budget in zip(QUESTIONS[:4], (5, 12, 30, 5), strict=True):
        with recorded_selections(local.model._pruner) as selections:
            local.embed(process(local, question, item, budget))
        ((candidates, kept),) = selections
        tokens = reference._tokens(item)
        importance, relevance = tokens.importance, reference._relevance(tokens, question)
        np.testing.assert_allclose(candidates.importance.numpy(), importance, rtol=1e-4)
        np.testing.assert_allclose(candidates.relevance.numpy(), relevance, atol=1e-5)
        assert kept.indices.tolist() == reference.kept(item, question, budget)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anchorprune_vllm.signals import word_matching
from anchorprune_vllm.signals.features import MediaFeatures
from anchorprune_vllm.signals.word_matching import WordMatching

SIZES = [6, 4, 6, 5]
QUESTIONS = [[3, 4, 5, 6, 7], [], [9], [1, 2, 3, 30, 40, 41, 42]]


@pytest.fixture
def table() -> Tensor:
    """Embeddings of 50 words."""
    return torch.randn(50, 5)


@pytest.fixture
def media() -> list[MediaFeatures]:
    return [MediaFeatures(embeddings=torch.randn(size, 5)) for size in SIZES]


def questions() -> list[Tensor]:
    return [
        torch.tensor([words], dtype=torch.long).reshape(min(1, len(words)), len(words))
        for words in QUESTIONS
    ]


@pytest.mark.parametrize("kind", ["max", "mean"])
@pytest.mark.parametrize("at_once", [1, 3, 4, 13, 512])
def test_each_item_is_matched_with_its_own_question(
    table: Tensor,
    media: list[MediaFeatures],
    at_once: int,
    kind: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(word_matching, "_WORDS_AT_ONCE", at_once)
    items = WordMatching(table.__getitem__, kind)(media, questions())
    for relevance, one, words in zip(items, media, QUESTIONS, strict=True):
        if not words:
            assert relevance is None
            continue
        cosines = F.cosine_similarity(one.rows[:, None], table[words], dim=-1)
        expected = cosines.amax(1) if kind == "max" else cosines.mean(1)
        torch.testing.assert_close(relevance, expected)


def test_what_lies_behind_an_embedding_is_not_matched(table: Tensor) -> None:
    rows = torch.randn(6, 5)
    wide = MediaFeatures(embeddings=torch.cat([rows, torch.randn(6, 10)], 1))
    (found,) = WordMatching(table.__getitem__, size=5)([wide], questions()[:1])
    (wanted,) = WordMatching(table.__getitem__)([MediaFeatures(embeddings=rows)], questions()[:1])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["max", "mean"])
def test_a_long_question_is_embedded_some_words_at_a_time(
    table: Tensor, media: list[MediaFeatures], kind: Any
) -> None:
    asked: list[int] = []

    def embed_words(ids: Tensor) -> Tensor:
        asked.append(len(ids))
        return table[ids]

    words = torch.randint(50, (1, 60_000))
    (relevance,) = WordMatching(embed_words, kind)(media[:1], [words])
    assert sum(asked) == 60_000
    assert max(asked) <= 512
    cosines = F.cosine_similarity(media[0].rows[:, None], table, dim=-1)
    counts = words.flatten().bincount(minlength=50)
    expected = cosines.amax(1) if kind == "max" else (cosines * counts).sum(1) / 60_000
    torch.testing.assert_close(relevance, expected)


def test_the_words_of_all_questions_are_embedded_together(
    table: Tensor, media: list[MediaFeatures]
) -> None:
    asked: list[list[int]] = []

    def embed_words(ids: Tensor) -> Tensor:
        asked.append(ids.tolist())
        return table[ids]

    WordMatching(embed_words)(media, questions())
    assert asked == [[word for words in QUESTIONS for word in words]]

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anchorprune_vllm.plan import ItemPlan, MediaTokens
from anchorprune_vllm.signals import word_matching
from anchorprune_vllm.signals.word_matching import MatchingSignals
from anchorprune_vllm.worker.feature_cache import MediaFeatures

SIZES = [(6,), (2, 2), (6,), (5,)]
QUESTIONS = [[3, 4, 5, 6, 7], [], [9], [1, 2, 3, 30, 40, 41, 42]]


@pytest.fixture
def table() -> Tensor:
    """Embeddings of 50 words."""
    return torch.randn(50, 5)


@pytest.fixture
def media() -> list[MediaFeatures]:
    return [MediaFeatures(torch.randn(sum(size), 5), torch.rand(sum(size))) for size in SIZES]


def plans() -> list[ItemPlan]:
    return [
        ItemPlan(
            2 + i,
            MediaTokens(sum(size), size, size),
            (0, i),
            torch.tensor([words], dtype=torch.long).reshape(min(1, len(words)), len(words)),
        )
        for i, (size, words) in enumerate(zip(SIZES, QUESTIONS, strict=True))
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
    items = MatchingSignals(table.__getitem__, kind).candidates(media, plans())
    for item, one, words in zip(items, media, QUESTIONS, strict=True):
        if not words:
            assert item.relevance is None
            continue
        cosines = F.cosine_similarity(one.hidden[:, None], table[words], dim=-1)
        expected = cosines.amax(1) if kind == "max" else cosines.mean(1)
        assert item.relevance is not None
        torch.testing.assert_close(item.relevance, expected)


@pytest.mark.parametrize("kind", ["max", "mean"])
def test_a_long_question_is_embedded_some_words_at_a_time(
    table: Tensor, media: list[MediaFeatures], kind: Any
) -> None:
    asked: list[int] = []

    def embed_words(ids: Tensor) -> Tensor:
        asked.append(len(ids))
        return table[ids]

    words = torch.randint(50, (1, 60_000))
    plan = ItemPlan(2, MediaTokens(6, (6,), (6,)), (0, 0), words)
    (item,) = MatchingSignals(embed_words, kind).candidates(media[:1], [plan])
    assert sum(asked) == 60_000
    assert max(asked) <= 512
    cosines = F.cosine_similarity(media[0].hidden[:, None], table, dim=-1)
    counts = words.flatten().bincount(minlength=50)
    expected = cosines.amax(1) if kind == "max" else (cosines * counts).sum(1) / 60_000
    assert item.relevance is not None
    torch.testing.assert_close(item.relevance, expected)


def test_the_words_of_all_questions_are_embedded_together(
    table: Tensor, media: list[MediaFeatures]
) -> None:
    asked: list[list[int]] = []

    def embed_words(ids: Tensor) -> Tensor:
        asked.append(ids.tolist())
        return table[ids]

    MatchingSignals(embed_words).candidates(media, plans())
    assert asked == [[word for words in QUESTIONS for word in words]]


def test_items_are_described_by_their_plans(table: Tensor, media: list[MediaFeatures]) -> None:
    items = MatchingSignals(table.__getitem__).candidates(media, plans())
    assert [item.budget for item in items] == [2, 3, 4, 5]
    assert items[0].units is None
    assert items[1].units is not None
    assert items[1].units.tolist() == [0, 0, 1, 1]
    assert all(item.features is one.hidden for item, one in zip(items, media, strict=True))
    assert all(item.importance is one.importance for item, one in zip(items, media, strict=True))

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anchorprune_vllm.feature_cache import MediaFeatures
from anchorprune_vllm.plan import ItemPlan, MediaTokens
from anchorprune_vllm.signals import matching
from anchorprune_vllm.signals.matching import MatchingSignals, best_match


@pytest.mark.parametrize("at_once", [1, 4, 256])
def test_the_best_of_all_words_counts(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_WORDS_AT_ONCE", at_once)
    tokens, words = torch.randn(7, 5), F.normalize(torch.randn(9, 5), dim=-1)
    expected = [
        max(float(F.cosine_similarity(token, word, dim=0)) for word in words) for token in tokens
    ]
    torch.testing.assert_close(best_match(tokens, words), torch.tensor(expected))


def test_each_item_is_matched_with_its_own_question() -> None:
    table = torch.randn(50, 5)
    asked: list[list[int]] = []

    def embed_words(ids: Tensor) -> Tensor:
        asked.append(ids.tolist())
        return table[ids]

    media = [MediaFeatures(torch.randn(n, 5), torch.rand(n)) for n in (6, 4, 6)]
    sizes = [(6,), (2, 2), (6,)]
    queries = [torch.tensor([[3, 4, 5]]), torch.empty(0, 0, dtype=torch.long), torch.tensor([[9]])]
    plans = [
        ItemPlan(2 + i, MediaTokens(sum(size), size, size), (0, i), query)
        for i, (size, query) in enumerate(zip(sizes, queries, strict=True))
    ]
    items = MatchingSignals(embed_words).candidates(media, plans)
    assert asked == [[3, 4, 5, 9]]
    assert items[1].relevance is None
    for number, ids in ((0, [3, 4, 5]), (2, [9])):
        expected = best_match(media[number].hidden, F.normalize(table[ids], dim=-1))
        assert items[number].relevance is not None
        torch.testing.assert_close(items[number].relevance, expected)
    assert [item.budget for item in items] == [2, 3, 4]
    assert items[0].units is None
    assert items[1].units is not None
    assert items[1].units.tolist() == [0, 0, 1, 1]
    assert all(item.features is one.hidden for item, one in zip(items, media, strict=True))
    assert all(item.importance is one.importance for item, one in zip(items, media, strict=True))

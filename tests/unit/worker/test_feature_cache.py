# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from anchorprune_vllm.signals.features import MediaFeatures
from anchorprune_vllm.worker.feature_cache import FeatureCache

SIZE = 3
TOKEN_BYTES = SIZE * 4 + 4
LAYOUT = {"context": ((SIZE,), torch.float32), "importance": ((), torch.float32)}


def make_cache(pages: int, page_tokens: int = 4) -> FeatureCache:
    capacity = pages * page_tokens * TOKEN_BYTES + 1
    return FeatureCache(capacity, page_tokens, LAYOUT, torch.device("cpu"))


def features(value: float, tokens: int) -> MediaFeatures:
    steps = torch.arange(tokens, dtype=torch.float32)
    return MediaFeatures(value + steps[:, None].expand(-1, SIZE), importance=value - steps)


def holds(cache: FeatureCache, key: str, value: float, tokens: int) -> bool:
    found, wanted = cache.get(key), features(value, tokens)
    return (
        found is not None
        and torch.equal(found.context, wanted.context)
        and torch.equal(found.importance, wanted.importance)
    )


def test_gives_back_copies_of_what_was_put() -> None:
    cache = make_cache(pages=4)
    given_features = MediaFeatures(torch.ones(6, SIZE), importance=torch.ones(6))
    cache.put("a", given_features)
    given_features.context.zero_()
    found = cache.get("a")
    assert found is not None
    assert torch.equal(found.context, torch.ones(6, SIZE))
    assert found.importance.shape == (6,)


def test_least_recently_used_goes_first() -> None:
    cache = make_cache(pages=3)
    for i, key in enumerate("abc"):
        cache.put(key, features(i, 4))
    cache.get("a")
    cache.put("d", features(9, 4))
    assert [cache.get(key) is not None for key in "abcd"] == [True, False, True, True]
    assert holds(cache, "a", 0, 4)
    assert holds(cache, "d", 9, 4)


def test_too_large_is_not_kept_and_costs_nothing() -> None:
    cache = make_cache(pages=2)
    cache.put("a", features(1, 4))
    cache.put("huge", features(2, 9))
    assert cache.get("huge") is None
    assert holds(cache, "a", 1, 4)


def test_no_capacity_keeps_nothing() -> None:
    cache = make_cache(pages=0)
    cache.put("a", features(1, 4))
    assert cache.get("a") is None


def test_clear_frees_all_pages() -> None:
    cache = make_cache(pages=2)
    cache.put("a", features(1, 8))
    cache.clear()
    assert cache.get("a") is None
    cache.put("b", features(2, 8))
    assert holds(cache, "b", 2, 8)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 20)), max_size=40))
def test_never_mixes_items_up(puts: list[tuple[str, int]]) -> None:
    """Whatever is evicted, an item that is still there is whole."""
    cache = make_cache(pages=5)
    there: dict[str, tuple[float, int]] = {}
    for number, (key, tokens) in enumerate(puts):
        if cache.get(key) is None:
            there[key] = (float(number), tokens)
        cache.put(key, features(number, tokens))
        for other in "abcdef":
            assert cache.get(other) is None or holds(cache, other, *there[other])

# SPDX-License-Identifier: Apache-2.0
"""The pruner with a toy model: what is encoded when, and in what memory results come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from torch import Tensor

from anchorprune_vllm.budget import Budget
from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.methods.registry import Method, method_of
from anchorprune_vllm.metrics.families import (
    ANCHOR_TOKENS,
    CACHE_BYTES,
    CACHE_CAPACITY,
    CACHE_HITS,
    CACHE_MISSES,
    SELECTION_SECONDS,
    SELECTIONS,
)
from anchorprune_vllm.metrics.selections import SelectionMetrics
from anchorprune_vllm.plan import DUMMY_MEDIA, ItemPlan, MediaTokens
from anchorprune_vllm.selection import Candidates, KeptTokens
from anchorprune_vllm.signals.features import MediaFeatures
from anchorprune_vllm.testing.selections import record_selections, recorded_selections
from anchorprune_vllm.worker.feature_cache import FeatureCache
from anchorprune_vllm.worker.pruner import VisualPruner
from tests.support.scrapes import Scrape

TOKENS, NEWLINES, SIZE = 10, 2, 4
LAYOUT = {"context": ((SIZE,), torch.float32), "importance": ((), torch.float32)}
METHOD = method_of(PruneConfig(budget=3))


def first_tokens(
    features: Sequence[MediaFeatures], questions: Sequence[Tensor]
) -> list[Tensor | None]:
    """The first tokens are the most relevant, where something is asked."""
    relevance = torch.linspace(1, 0, TOKENS)
    return [relevance if question.numel() else None for question in questions]


class ToyImages:
    """Media whose features are a function of a seed."""

    def __init__(self, seeds: list[int], sizes: Sequence[int] = ()) -> None:
        self.seeds = seeds
        self.sizes = dict(zip(seeds, sizes, strict=False))
        self.encoded: list[list[int]] = []
        self.whole: list[list[int]] = []

    def features(self, seed: int) -> MediaFeatures:
        generator = torch.Generator().manual_seed(seed)
        tokens = self.sizes.get(seed, TOKENS)
        context = torch.randn(tokens, SIZE, generator=generator)
        return MediaFeatures(context, importance=torch.rand(tokens, generator=generator))

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        self.encoded.append([self.seeds[i] for i in items])
        return [self.features(self.seeds[i]) for i in items]

    def embed_unpruned(self, items: list[int]) -> list[Tensor]:
        self.whole.append([self.seeds[i] for i in items])
        return [self.features(self.seeds[i]).rows + 100 for i in items]

    def project(self, context: Tensor) -> Tensor:
        return context + 100

    def positions(self, item: int, plan: ItemPlan) -> None:
        return None


def plan(seed: int, kept: int = 3) -> ItemPlan:
    return ItemPlan(
        kept, MediaTokens(TOKENS + NEWLINES, (TOKENS,), (5,)), (seed, 1), torch.empty(0, 0)
    )


@pytest.fixture
def pruner() -> VisualPruner:
    cache = FeatureCache(4 * TOKENS * 20, TOKENS, LAYOUT, torch.device("cpu"))
    return VisualPruner(None, METHOD, cache, 3 * (TOKENS + NEWLINES), SIZE)


def test_each_item_keeps_rows_of_its_own_media(pruner: VisualPruner) -> None:
    seeds = [5, 6, 5, 7]
    images = ToyImages(seeds)
    out = pruner.embed(images, [plan(s, k) for s, k in zip(seeds, [3, 2, 10, 1], strict=True)])
    assert [len(rows) for rows in out] == [3, 2, 10, 1]
    for rows, seed in zip(out, seeds, strict=True):
        own = {tuple(row) for row in (images.features(seed).rows + 100).tolist()}
        assert {tuple(row) for row in rows.tolist()} <= own


def test_selection_is_timed(pruner: VisualPruner, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = SimpleNamespace(perf_counter=count().__next__)  # a second each
    monkeypatch.setattr("anchorprune_vllm.metrics.stopwatch.time", looks)
    images = ToyImages([1, 2, 3])
    pruner.embed(images, [plan(1), plan(2), plan(3, kept=TOKENS)])
    seconds, items = pruner.selection_time.read()
    assert items == 2  # of the third, all is kept
    assert seconds == 1


def test_media_are_encoded_once(pruner: VisualPruner) -> None:
    images = ToyImages([1, 1, 2])
    pruner.embed(images, [plan(1, 3), plan(1, 4), plan(2)])
    pruner.embed(images, [plan(1, 5), plan(1, 6), plan(2)])
    assert images.encoded == [[1, 2]]


@pytest.mark.parametrize(
    ("limit", "calls"),
    [
        # Three have 36 unpruned tokens, of which 30 are candidates.
        (36, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (35, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_no_call_exceeds_the_encoder_budget(limit: int, calls: list[list[int]]) -> None:
    cache = FeatureCache(0, TOKENS, LAYOUT, torch.device("cpu"))
    pruner = VisualPruner(None, METHOD, cache, limit, SIZE)
    seeds = list(range(8))
    images = ToyImages(seeds)
    pruner.embed(images, [plan(s) for s in seeds])
    assert images.encoded == calls


def test_an_item_larger_than_the_budget_goes_alone() -> None:
    cache = FeatureCache(0, TOKENS, LAYOUT, torch.device("cpu"))
    small = VisualPruner(None, METHOD, cache, TOKENS - 1, SIZE)
    images = ToyImages([1, 2])
    small.embed(images, [plan(1), plan(2)])
    assert images.encoded == [[1], [2]]


def test_only_what_the_tower_sees_counts() -> None:
    """Media that the cache knows, or that come twice, go beside any number of others."""
    cache = FeatureCache(8 * TOKENS * 20, TOKENS, LAYOUT, torch.device("cpu"))
    pruner = VisualPruner(None, METHOD, cache, 2 * (TOKENS + NEWLINES), SIZE)
    pruner.embed(ToyImages([1, 2]), [plan(1), plan(2)])
    seeds = [1, 3, 2, 3, 1, 4, 5]
    images = ToyImages(seeds)
    pruner.embed(images, [plan(seed) for seed in seeds])
    assert images.encoded == [[3, 4], [5]]


@pytest.fixture
def batches() -> list[list[int]]:
    """Tokens of the items of each selection by the method `watched`."""
    return []


@pytest.fixture
def watched(batches: list[list[int]]) -> Method:
    def select(items: Sequence[Candidates]) -> list[KeptTokens]:
        batches.append([len(item.features) for item in items])
        return METHOD.select(items)

    return replace(METHOD, select=select)


def test_selection_of_a_call_is_one_batch(batches: list[list[int]], watched: Method) -> None:
    cache = FeatureCache(8 * TOKENS * 20, TOKENS, LAYOUT, torch.device("cpu"))
    pruner = VisualPruner(None, watched, cache, 4 * TOKENS, SIZE)
    seeds = [1, 2, 3, 4]
    images = ToyImages(seeds)
    pruner.embed(images, [plan(seed) for seed in seeds])
    assert images.encoded == [[1, 2, 3], [4]]  # 12 tokens each, newlines included
    assert batches == [[TOKENS] * 4]


def test_items_of_unlike_sizes(batches: list[list[int]], watched: Method) -> None:
    """One batch, and each item keeps rows of its own."""
    cache = FeatureCache(0, TOKENS, LAYOUT, torch.device("cpu"))
    pruner = VisualPruner(None, watched, cache, 60, SIZE)
    sizes = [4, 5, 50, 4, 20, 20, 20, 61, 4]
    images = ToyImages(list(range(len(sizes))), sizes)
    out = pruner.embed(
        images, [replace(plan(i), tokens=MediaTokens(n, (n,), (1,))) for i, n in enumerate(sizes)]
    )
    assert batches == [sizes]
    for number, rows in enumerate(out):
        own = {tuple(row) for row in (images.features(number).rows + 100).tolist()}
        assert {tuple(row) for row in rows.tolist()} <= own


class TestWarmUp:
    """vLLM's dummies: all tokens of the largest items are asked for."""

    DUMMY = ItemPlan(TOKENS, MediaTokens(12, (TOKENS,), (5,)), DUMMY_MEDIA, torch.ones(1, 4).long())

    def pruner(self, tmp_path: Path, method: Method) -> VisualPruner:
        cache = FeatureCache(9 * TOKENS * 20, TOKENS, LAYOUT, torch.device("cpu"))
        metrics = SelectionMetrics(tmp_path, "model", "1", has_anchors=True)
        return VisualPruner(first_tokens, method, cache, 99, SIZE, metrics)

    def test_both_ways_are_run_on_all_items(self, tmp_path: Path) -> None:
        pruner, images = self.pruner(tmp_path, METHOD), ToyImages([1, 2])
        assert not pruner.is_warm
        with recorded_selections(pruner) as selections:
            out = pruner.warm_up(images, [self.DUMMY] * 2, Budget.parse(3))
        assert pruner.is_warm
        assert [len(rows) for rows in out] == [TOKENS, TOKENS]
        assert (images.encoded, images.whole) == ([[1, 2]], [[1, 2]])
        assert [len(kept.indices) for _, kept in selections] == [3, 3]
        assert all(item.relevance is not None for item, _ in selections)

    @pytest.mark.parametrize(("budget", "kept"), [("100%", 9), (99, 9), ("1%", 1)])
    def test_something_is_pruned_whatever_the_budget(
        self, tmp_path: Path, budget: str | int, kept: int
    ) -> None:
        pruner = self.pruner(tmp_path, METHOD)
        with recorded_selections(pruner) as selections:
            pruner.warm_up(ToyImages([1]), [self.DUMMY], Budget.parse(budget))
        assert [len(tokens.indices) for _, tokens in selections] == [kept]

    def test_nothing_is_left_of_it(self, tmp_path: Path) -> None:
        pruner = self.pruner(tmp_path, METHOD)
        pruner.warm_up(ToyImages([1]), [self.DUMMY], Budget.parse(3))
        images = ToyImages([1])
        pruner.embed(images, [replace(plan(1), media_key=(0, 0))])
        assert images.encoded == [[1]]
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(tmp_path))
        scrape = Scrape.of(registry)
        assert (scrape.value(SELECTIONS), scrape.value(CACHE_MISSES)) == (1, 1)

    def test_methods_are_not_tried_on_more_than_they_take(
        self, tmp_path: Path, batches: list[list[int]], watched: Method
    ) -> None:
        pruner = self.pruner(tmp_path, replace(watched, most_tokens=TOKENS - 1))
        images = ToyImages([1])
        pruner.warm_up(images, [self.DUMMY], Budget.parse(3))
        assert (images.encoded, batches) == ([[1]], [])


def test_unpruned_items_take_the_models_own_path(pruner: VisualPruner) -> None:
    images = ToyImages([1, 2, 3])
    out = pruner.embed(images, [plan(1), plan(2, TOKENS), plan(3)])
    assert images.whole == [[2]]
    assert images.encoded == [[1, 3]]
    assert torch.equal(out[1], images.features(2).rows + 100)


def test_results_own_their_memory(pruner: VisualPruner) -> None:
    for rows in pruner.embed(ToyImages([1, 2]), [plan(1), plan(2)]):
        assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()


def test_forget_media(pruner: VisualPruner) -> None:
    images = ToyImages([1])
    pruner.embed(images, [plan(1)])
    pruner.forget_media()
    pruner.embed(images, [plan(1)])
    assert images.encoded == [[1], [1]]


def test_a_full_cache_never_mixes_media_up() -> None:
    """With room for one, what was read and what is written share a page."""
    page = TOKENS * (SIZE + 1) * 4
    cache = FeatureCache(page, TOKENS, LAYOUT, torch.device("cpu"))
    pruner = VisualPruner(None, METHOD, cache, 99, SIZE)
    fresh = VisualPruner(
        None,
        METHOD,
        FeatureCache(0, TOKENS, LAYOUT, torch.device("cpu")),
        max_encoder_tokens=99,
        embedding_size=SIZE,
    )
    for seeds in ([1], [2, 1], [1], [2], [3, 2, 1], [1, 3]):
        plans = [plan(seed) for seed in seeds]
        rows = pruner.embed(ToyImages(seeds), plans)
        expected = fresh.embed(ToyImages(seeds), plans)
        assert all(torch.equal(*pair) for pair in zip(rows, expected, strict=True))


@pytest.mark.parametrize("has_anchors", [True, False])
def test_metrics(tmp_path: Path, has_anchors: bool) -> None:
    page = TOKENS * (SIZE + 1) * 4
    pruner = VisualPruner(
        first_tokens,
        METHOD,
        FeatureCache(3 * page + 1, TOKENS, LAYOUT, torch.device("cpu")),
        max_encoder_tokens=99,
        embedding_size=SIZE,
        metrics=SelectionMetrics(tmp_path, "model", "1", has_anchors=has_anchors),
    )
    kept, recorded = [], record_selections(pruner)
    asked = torch.ones(1, 4, dtype=torch.int64)
    for seeds in ([1, 1, 2], [2, 3], [4]):
        plans = [replace(plan(seed, 6), query_ids=asked) for seed in seeds]
        pruner.embed(ToyImages([*seeds, 9]), [*plans, plan(9, kept=TOKENS)])
        kept += [tokens for _, tokens in recorded]
        recorded.clear()
    pruner.embed(ToyImages([4]), [plan(4)])  # without a question: no anchor
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    scrape = Scrape.of(registry)
    assert scrape.value(CACHE_MISSES, engine="1", model_name="model") == 4
    assert scrape.value(CACHE_HITS) == 3  # 1 and 2 again, and 4
    assert scrape.value(SELECTIONS) == 7
    assert scrape.value(SELECTION_SECONDS) == pytest.approx(pruner.selection_time.read()[0])
    assert scrape.value(CACHE_BYTES) == scrape.value(CACHE_CAPACITY) == 3 * page
    sizes = [int(tokens.is_anchor.sum()) for tokens in kept]
    assert len(sizes) == 6
    assert all(sizes)
    if has_anchors:
        assert scrape.value(f"{ANCHOR_TOKENS.name}_sum") == sum(sizes)
        assert scrape.value(f"{ANCHOR_TOKENS.name}_count") == 6
    else:
        assert f"{ANCHOR_TOKENS.name}_sum" not in scrape.names


def test_the_cache_is_shown_before_and_between_items(tmp_path: Path) -> None:
    page = TOKENS * (SIZE + 1) * 4
    pruner = VisualPruner(
        None,
        METHOD,
        FeatureCache(3 * page + 1, TOKENS, LAYOUT, torch.device("cpu")),
        max_encoder_tokens=99,
        embedding_size=SIZE,
        metrics=SelectionMetrics(tmp_path, "model", "1", has_anchors=True),
    )
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))

    def shown() -> tuple[float, float]:
        scrape = Scrape.of(registry)
        return scrape.value(CACHE_BYTES), scrape.value(CACHE_CAPACITY)

    assert shown() == (0, 3 * page)
    pruner.embed(ToyImages([1]), [plan(1)])
    assert shown() == (page, 3 * page)
    pruner.forget_media()
    assert shown() == (0, 3 * page)


@pytest.mark.parametrize("is_projected", [False, True])
@pytest.mark.parametrize("is_aligned", [False, True])
def test_candidates_are_described_by_features_and_plan(
    is_projected: bool, is_aligned: bool
) -> None:
    """Stage 1 measures in the question's space, Stage 2 among the tower's rows; else embeddings."""
    rows = torch.randn(TOKENS, SIZE + 3)  # DeepStack's levels behind
    aligned = torch.randn(TOKENS, 2) if is_aligned else None
    context = torch.randn(TOKENS, 5)
    given = MediaFeatures(
        context=context if is_projected else None,
        aligned=aligned,
        embeddings=None if is_projected else rows,
        importance=torch.rand(TOKENS),
        keys=torch.randn(TOKENS, 2, 3),
    )
    images = ToyImages([1])
    images.encode = lambda items: [given]  # type: ignore[method-assign]
    images.project = (lambda rows: rows[:, :SIZE]) if is_projected else None  # type: ignore
    seen: list[Candidates] = []

    def select(items: Sequence[Candidates]) -> list[KeptTokens]:
        seen.extend(items)
        return METHOD.select(items)

    method = replace(METHOD, select=select, needs=frozenset({"projected"}))
    cache = FeatureCache(0, TOKENS, LAYOUT, torch.device("cpu"))
    units = MediaTokens(TOKENS, (4, 6), (2, 3))
    asked = ItemPlan(3, units, (7, 1), torch.ones(1, 4, dtype=torch.int64))
    pruner = VisualPruner(first_tokens, method, cache, 99, SIZE)
    (kept,) = pruner.embed(images, [asked])
    (item,) = seen
    stage_2 = context if is_projected else rows[:, :SIZE]
    assert torch.equal(item.context, stage_2)
    assert torch.equal(item.features, stage_2 if aligned is None else aligned)
    assert torch.equal(item.projected, context[:, :SIZE] if is_projected else rows)
    assert kept.shape == (3, SIZE if is_projected else SIZE + 3)
    assert item.relevance is not None
    assert item.importance is given.importance
    assert item.keys is given.keys
    assert item.object_attention is None
    assert (item.budget, item.seed, item.grids) == (3, 7, units.grids)
    assert item.units.tolist() == [0] * 4 + [1] * 6

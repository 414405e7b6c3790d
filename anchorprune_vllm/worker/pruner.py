# SPDX-License-Identifier: Apache-2.0
"""`VisualPruner`: what every pruned model does between vision tower and language model.

encode (or read the feature cache) -> signals -> select -> gather K rows -> project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from anchorprune_vllm.budget import Budget
from anchorprune_vllm.methods.registry import Method
from anchorprune_vllm.metrics.selections import SelectionMetrics
from anchorprune_vllm.metrics.stopwatch import Stopwatch
from anchorprune_vllm.plan import ItemPlan, MediaKey
from anchorprune_vllm.selection import Candidates, KeptTokens
from anchorprune_vllm.signals.features import MediaFeatures, Relevance
from anchorprune_vllm.worker.feature_cache import FeatureCache
from anchorprune_vllm.worker.frame_text import put_among_text
from anchorprune_vllm.worker.positions import MediaPositions, with_positions
from anchorprune_vllm.worker.shares import select_with_shares


class MediaBatch(Protocol):
    """The images or videos of one call, which a model offers to the pruner by their index."""

    project: Callable[[Tensor], Tensor] | None
    """Projects rows of the tower [K, D2] to rows of the language model [K, H]; None if the features
    hold the latter already."""

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        """Run the vision tower on some items and return their features."""

    def embed_unpruned(self, items: list[int]) -> Sequence[Tensor]:
        """Return embeddings [N, H] of each item, made on the model's own unpruned path."""

    def positions(self, item: int, plan: ItemPlan) -> MediaPositions | None:
        """Return the native positions of an item, or None if positions are compact.

        They are those of its candidates; of all its embeddings if the plan keeps all; and of all
        its tokens if the plan moves text.
        """


class VisualPruner:
    """Embeds images and videos, each pruned by its plan.

    Args:
        relevance: Compares tokens with questions; None if the method does not need that.
        method: The method that selects tokens.
        cache: Stores the vision tower's outputs for recent media.
        max_encoder_tokens: The largest call of the vision tower, in unpruned tokens.
        embedding_size: H of the language model; rows may be wider.
        metrics: Counts selections; None if no metrics are wanted.
        embed_text: A function from token ids [M] to embeddings [M, H], for text that is embedded
            among kept tokens.
    """

    def __init__(
        self,
        relevance: Relevance | None,
        method: Method,
        cache: FeatureCache,
        max_encoder_tokens: int,
        embedding_size: int,
        metrics: SelectionMetrics | None = None,
        embed_text: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._metrics = metrics
        self._relevance = relevance
        self._embedding_size = embedding_size
        self._method = method
        self._cache = cache
        self._max_encoder_tokens = max_encoder_tokens
        self._embed_text = embed_text
        self.selection_time = Stopwatch()
        """The time of signals and selection, without what is read from the tower's attention."""
        self.is_warm = False
        """Whether dummy items have been embedded."""
        self._show_cache()

    def embed(self, media: MediaBatch, plans: Sequence[ItemPlan]) -> list[Tensor]:
        """Return the embeddings [K, H] of each item, in order.

        Those of pruned items have memory of their own.
        """
        whole = [i for i, plan in enumerate(plans) if plan.keeps_all]
        pruned = [i for i, plan in enumerate(plans) if not plan.keeps_all]
        embedded: dict[int, Tensor] = {}
        for batch in self._tower_batches(whole, plans):  # views of one batch, as in vLLM itself
            for i, rows in zip(batch, media.embed_unpruned(batch), strict=True):
                positions = media.positions(i, plans[i])
                embedded[i] = rows if positions is None else with_positions(rows, positions)
        if pruned:
            embedded.update(self._embed_pruned(media, pruned, plans))
        return [embedded[i] for i in range(len(plans))]

    def warm_up(self, media: MediaBatch, plans: Sequence[ItemPlan], budget: Budget) -> list[Tensor]:
        """Embed vLLM's dummy items pruned to a budget, then unpruned, and return the latter.

        This compiles whatever a request would compile, and lets vLLM's profiling see the memory of
        both paths.
        """
        candidates = plans[0].tokens.candidates  # all dummy items have the same
        kept = max(1, min(budget.tokens(candidates), candidates - 1))
        # Each item gets a media key of its own, as in the largest batch that a step may have.
        keys = [(0, number) for number in range(len(plans))]
        pruned = [replace(p, kept=kept, media_key=key) for p, key in zip(plans, keys, strict=True)]
        items = list(range(len(plans)))
        if self._method.most_tokens is None or candidates <= self._method.most_tokens:
            self._prune(media, items, pruned)
        else:  # the method never sees such an item, because its request is refused
            self._features(media, items, pruned)
        self.selection_time = Stopwatch()
        self.forget_media()
        self.is_warm = True
        return self.embed(media, plans)

    def use_cache(self, make: Callable[[], FeatureCache]) -> None:
        """Replace the cache, once the size of a row is known."""
        del self._cache  # the old one is freed first: there may be no memory for both
        self._cache = make()
        self._show_cache()

    def forget_media(self) -> None:
        """Drop all cached tower outputs, as after a change of weights."""
        self._cache.clear()
        self._show_cache()

    def _show_cache(self) -> None:
        if self._metrics is not None:
            self._metrics.show_cache(self._cache)

    def _tower_batches(
        self, items: Sequence[int], plans: Sequence[ItemPlan]
    ) -> Iterator[list[int]]:
        """Group items so that no call of the vision tower is larger than in an unpruned engine.

        Usually the scheduler ensures this already (`engine_core/encoder_budget.py`).
        """
        batch: list[int] = []
        tokens = 0
        for i in items:
            if batch and tokens + plans[i].tokens.unpruned > self._max_encoder_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(i)
            tokens += plans[i].tokens.unpruned
        if batch:
            yield batch

    def _embed_pruned(
        self, media: MediaBatch, items: list[int], plans: Sequence[ItemPlan]
    ) -> dict[int, Tensor]:
        embeddings, kept, encoded = self._prune(media, items, plans)
        if self._metrics is not None:
            asked = zip(items, kept, strict=True)
            anchors = [tokens.is_anchor for i, tokens in asked if plans[i].query_ids.numel()]
            self._metrics.count(len(items), encoded, anchors, self.selection_time, self._cache)
        return embeddings

    def _prune(
        self, media: MediaBatch, items: list[int], plans: Sequence[ItemPlan]
    ) -> tuple[dict[int, Tensor], list[KeptTokens], int]:
        """Return embeddings by item, the tokens kept of each, and how many media were encoded."""
        features, encoded = self._features(media, items, plans)
        with self.selection_time.timing(len(items), features[0].rows.device):
            asked = [plans[i] for i in items]
            candidates = self._candidates(media, features, asked)
            kept = select_with_shares(
                self._method.select, candidates, [plan.shares for plan in asked]
            )
        rows = [k.rows_of(f.rows) for f, k in zip(features, kept, strict=True)]
        parts = self._language_rows(media, rows)
        embeddings = {}
        for i, part, tokens in zip(items, parts, kept, strict=True):
            positions, places = media.positions(i, plans[i]), tokens.indices
            # These are copies: vLLM keeps the tensors, and a view would keep its whole batch alive.
            if plans[i].moves_text:
                assert self._embed_text is not None
                part, places = put_among_text(part, places, plans[i].layout, self._embed_text)
            elif positions is None:
                part = part.clone()
            embeddings[i] = (
                part if positions is None else with_positions(part, positions.of(places))
            )
        # The cache is written last, because this may overwrite pages that features are views of.
        for key, media_features in encoded.items():
            self._cache.put(key, media_features)
        return embeddings, kept, len(encoded)

    def _candidates(
        self, media: MediaBatch, features: Sequence[MediaFeatures], plans: Sequence[ItemPlan]
    ) -> list[Candidates]:
        """Return the candidates of each item, with all the signals that the method needs."""
        questions = [plan.query_ids for plan in plans]
        relevance: Sequence[Tensor | None] = [None] * len(plans)
        if self._relevance is not None:
            relevance = self._relevance(features, questions)
        projected: Sequence[Tensor | None] = [None] * len(plans)
        if "projected" in self._method.needs:
            projected = self._language_rows(media, [item.rows for item in features])
        return [
            self._candidates_of(*item)
            for item in zip(features, plans, relevance, projected, strict=True)
        ]

    def _candidates_of(
        self,
        features: MediaFeatures,
        plan: ItemPlan,
        relevance: Tensor | None,
        projected: Tensor | None,
    ) -> Candidates:
        context = features.rows[:, : self._embedding_size]
        if features.context is not None:
            context = features.context
        importance = features.importance
        return Candidates(
            relevance=relevance,
            features=context if features.aligned is None else features.aligned,
            # Empty, so that a method that reads importance without asking for it fails.
            importance=context.new_empty(0) if importance is None else importance,
            budget=plan.kept,
            context_features=context,
            units=plan.units,
            projected=projected,
            keys=features.keys,
            object_attention=features.object_attention,
            grids=plan.tokens.grids,
            seed=plan.media_key[0],
        )

    def _language_rows(self, media: MediaBatch, rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the rows of the language model for the tower's rows of each item."""
        if media.project is None:
            return rows
        return media.project(torch.cat(list(rows))).split([len(each) for each in rows])

    def _features(
        self, media: MediaBatch, items: list[int], plans: Sequence[ItemPlan]
    ) -> tuple[list[MediaFeatures], dict[MediaKey, MediaFeatures]]:
        """Return the features of each item, and, by media key, those that are not cached yet.

        The tower runs once for each distinct media, however many items share it.
        """
        keys = [plans[i].media_key for i in items]
        cached = {key: self._cache.get(key) for key in keys}
        missing = {key: i for key, i in zip(keys, items, strict=True) if cached[key] is None}
        encoded: dict[MediaKey, MediaFeatures] = {}
        for batch in self._tower_batches(list(missing.values()), plans):
            in_batch = [plans[i].media_key for i in batch]
            encoded.update(zip(in_batch, media.encode(batch), strict=True))
        return [cached[key] or encoded[key] for key in keys], encoded

# SPDX-License-Identifier: Apache-2.0
"""`VisualPruner`: what every pruned model does between vision tower and language media.

encode (or take from the feature cache) -> signals -> select -> gather K rows -> project.
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
    """The images or videos of one call, as a model gives them to the pruner, by their index."""

    project: Callable[[Tensor], Tensor] | None
    """Makes rows of the language model [K, H] of the tower's [K, D2]; None: features have them."""

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        """Run the vision tower."""

    def embed_unpruned(self, items: list[int]) -> Sequence[Tensor]:
        """The model's own unpruned path: [N, H] for each item."""

    def positions(self, item: int, plan: ItemPlan) -> MediaPositions | None:
        """Native positions of an item's candidates, or of all its embeddings if its plan keeps all.

        If its plan moves text, of all its tokens. None: positions are compact.
        """


class VisualPruner:
    """Embeds images and videos, each pruned by its plan.

    relevance: compares them with questions; None: the method compares nothing.
    cache: keeps what the tower gave for recent media.
    max_encoder_tokens: the largest call of the vision tower, in unpruned tokens.
    embedding_size: H of the language model; rows may be wider.
    embed_text: token ids [M] to embeddings [M, H], for text that is embedded among kept tokens.
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
        """Of signals and selection; what looks into the tower's attention is the tower's time."""
        self.is_warm = False
        """Whether dummy items were embedded."""
        self._show_cache()

    def embed(self, media: MediaBatch, plans: Sequence[ItemPlan]) -> list[Tensor]:
        """Embeddings [K, H] of each item, in order; pruned ones in memory of their own."""
        whole = [i for i, plan in enumerate(plans) if plan.keeps_all]
        pruned = [i for i, plan in enumerate(plans) if not plan.keeps_all]
        embedded: dict[int, Tensor] = {}
        for batch in self._tower_batches(whole, plans):  # exactly as vLLM would: views of one batch
            for i, rows in zip(batch, media.embed_unpruned(batch), strict=True):
                positions = media.positions(i, plans[i])
                embedded[i] = rows if positions is None else with_positions(rows, positions)
        if pruned:
            embedded.update(self._embed_pruned(media, pruned, plans))
        return [embedded[i] for i in range(len(plans))]

    def warm_up(self, media: MediaBatch, plans: Sequence[ItemPlan], budget: Budget) -> list[Tensor]:
        """Embed vLLM's dummy items, first pruned to a budget and then whole: returns the latter.

        What a request compiles is compiled then, and vLLM's profiling sees the memory of both.
        """
        candidates = plans[0].tokens.candidates  # the same of all
        kept = max(1, min(budget.tokens(candidates), candidates - 1))
        # Each of them another media, as in the largest batch that a step may have.
        keys = [(0, number) for number in range(len(plans))]
        pruned = [replace(p, kept=kept, media_key=key) for p, key in zip(plans, keys, strict=True)]
        items = list(range(len(plans)))
        if self._method.most_tokens is None or candidates <= self._method.most_tokens:
            self._prune(media, items, pruned)
        else:  # such a request is refused
            self._features(media, items, pruned)
        self.selection_time = Stopwatch()
        self.forget_media()
        self.is_warm = True
        return self.embed(media, plans)

    def use_cache(self, make: Callable[[], FeatureCache]) -> None:
        """Take another cache, once it is known how large a row is."""
        del self._cache  # first, as there may be no memory for both
        self._cache = make()
        self._show_cache()

    def forget_media(self) -> None:
        """Drop cached tower outputs: the weights have changed."""
        self._cache.clear()
        self._show_cache()

    def _show_cache(self) -> None:
        if self._metrics is not None:
            self._metrics.show_cache(self._cache)

    def _tower_batches(
        self, items: Sequence[int], plans: Sequence[ItemPlan]
    ) -> Iterator[list[int]]:
        """Group items so that no call of the vision tower is larger than the unpruned engine's.

        The scheduler sees to that where it can (`engine_core/encoder_budget.py`).
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
        """Return the embeddings of items, what is kept of each, and how many media were encoded."""
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
            # Copies: vLLM keeps these tensors, and a view would keep its whole batch alive.
            if plans[i].moves_text:
                assert self._embed_text is not None
                part, places = put_among_text(part, places, plans[i].layout, self._embed_text)
            elif positions is None:
                part = part.clone()
            embeddings[i] = (
                part if positions is None else with_positions(part, positions.of(places))
            )
        # Only now: what the cache gave above are views of pages that this may overwrite.
        for key, media_features in encoded.items():
            self._cache.put(key, media_features)
        return embeddings, kept, len(encoded)

    def _candidates(
        self, media: MediaBatch, features: Sequence[MediaFeatures], plans: Sequence[ItemPlan]
    ) -> list[Candidates]:
        """Describe the items with all that the method needs."""
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
            # A method that does not ask for importance and reads it all the same would notice.
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
        """Return the rows of the language model that `rows` of items are, or become."""
        if media.project is None:
            return rows
        return media.project(torch.cat(list(rows))).split([len(each) for each in rows])

    def _features(
        self, media: MediaBatch, items: list[int], plans: Sequence[ItemPlan]
    ) -> tuple[list[MediaFeatures], dict[MediaKey, MediaFeatures]]:
        """Tower outputs of each item, and those among them that the cache does not have yet.

        The tower runs once for each media, however many items share it.
        """
        keys = [plans[i].media_key for i in items]
        cached = {key: self._cache.get(key) for key in keys}
        missing = {key: i for key, i in zip(keys, items, strict=True) if cached[key] is None}
        encoded: dict[MediaKey, MediaFeatures] = {}
        for batch in self._tower_batches(list(missing.values()), plans):
            in_batch = [plans[i].media_key for i in batch]
            encoded.update(zip(in_batch, media.encode(batch), strict=True))
        return [cached[key] or encoded[key] for key in keys], encoded

# SPDX-License-Identifier: Apache-2.0
"""`VisualPruner`: what every pruned model does between vision tower and language model.

encode (or take from the feature cache) -> signals -> select -> gather K rows -> project.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from anchorprune_vllm.feature_cache import FeatureCache, MediaFeatures
from anchorprune_vllm.methods import Method
from anchorprune_vllm.metrics.selections import SelectionMetrics
from anchorprune_vllm.plan import ItemPlan, MediaKey
from anchorprune_vllm.positions import MediaPositions, with_positions
from anchorprune_vllm.selection import Candidates
from anchorprune_vllm.stopwatch import Stopwatch


class Signals(Protocol):
    """Turns tower outputs and questions into what selection ranks by."""

    def candidates(
        self, features: Sequence[MediaFeatures], plans: Sequence[ItemPlan]
    ) -> list[Candidates]: ...


class PrunableModel(Protocol):
    """The parts of a vision-language model that the pruner calls, on items given by index."""

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        """Run the vision tower."""

    def embed_whole(self, items: list[int]) -> Sequence[Tensor]:
        """The model's own unpruned path: [N, H] for each item."""

    def project(self, hidden: Tensor) -> Tensor:
        """Hidden features to language-model embeddings: [K, D] to [K, H]."""

    def positions(self, item: int, plan: ItemPlan) -> MediaPositions | None:
        """Native positions of an item's candidates, or of all its tokens if its plan keeps all.

        None: positions are compact.
        """


class VisualPruner:
    """Embeds media items, each pruned by its plan."""

    def __init__(
        self,
        signals: Signals,
        method: Method,
        cache: FeatureCache,
        max_encoder_tokens: int,
        metrics: SelectionMetrics | None = None,
    ) -> None:
        self._metrics = metrics
        self._signals = signals
        self._method = method
        self._cache = cache
        self._max_encoder_tokens = max_encoder_tokens
        self.selection_time = Stopwatch()
        """Of signals and selection; what looks into the tower's attention is the tower's time."""
        self._show_cache()

    def embed(self, model: PrunableModel, plans: Sequence[ItemPlan]) -> list[Tensor]:
        """Embeddings [K, H] of each item, in order; pruned ones in memory of their own."""
        embedded: dict[int, Tensor] = {}
        for batch in self._micro_batches(plans):
            whole = [i for i in batch if plans[i].keeps_all]
            pruned = [i for i in batch if not plans[i].keeps_all]
            if whole:  # exactly as vLLM would: views of one batch
                for i, rows in zip(whole, model.embed_whole(whole), strict=True):
                    positions = model.positions(i, plans[i])
                    embedded[i] = rows if positions is None else with_positions(rows, positions)
            if pruned:
                embedded.update(self._embed_pruned(model, pruned, plans))
        return [embedded[i] for i in range(len(plans))]

    def forget_media(self) -> None:
        """Drop cached tower outputs: the weights have changed."""
        self._cache.clear()
        self._show_cache()

    def _show_cache(self) -> None:
        if self._metrics is not None:
            self._metrics.show_cache(self._cache)

    def _micro_batches(self, plans: Sequence[ItemPlan]) -> Iterator[list[int]]:
        """Items grouped so that no vision-tower call is larger than the unpruned engine's.

        The scheduler counts K tokens for an item that it would otherwise count in full.
        """
        batch: list[int] = []
        tokens = 0
        for i, plan in enumerate(plans):
            if batch and tokens + plan.tokens.unpruned > self._max_encoder_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(i)
            tokens += plan.tokens.unpruned
        yield batch

    def _embed_pruned(
        self, model: PrunableModel, items: list[int], plans: Sequence[ItemPlan]
    ) -> dict[int, Tensor]:
        features, encoded = self._features(model, items, plans)
        with self.selection_time.timing(len(items), features[0].hidden.device):
            kept = self._method.select(self._candidates(model, features, [plans[i] for i in items]))
        rows = [k.rows_of(f.hidden) for f, k in zip(features, kept, strict=True)]
        projected = model.project(torch.cat(rows)).split([len(row) for row in rows])
        embeddings = {}
        for i, part, tokens in zip(items, projected, kept, strict=True):
            positions = model.positions(i, plans[i])
            # Copies: vLLM keeps these tensors, and a view would keep its whole batch alive.
            embeddings[i] = (
                part.clone()
                if positions is None
                else with_positions(part, positions.of(tokens.indices))
            )
        # Only now: what the cache gave above are views of pages that this may overwrite.
        for media, media_features in encoded.items():
            self._cache.put(media, media_features)
        if self._metrics is not None:
            asked = zip(items, kept, strict=True)
            anchors = [tokens.is_anchor for i, tokens in asked if plans[i].query_ids.numel()]
            self._metrics.count(len(items), len(encoded), anchors, self.selection_time, self._cache)
        return embeddings

    def _candidates(
        self, model: PrunableModel, features: Sequence[MediaFeatures], plans: Sequence[ItemPlan]
    ) -> list[Candidates]:
        """The items with all that the method needs."""
        projected: Sequence[Tensor | None] = [None] * len(features)
        if "projected" in self._method.needs:
            hidden = [item.hidden for item in features]
            projected = model.project(torch.cat(hidden)).split([len(rows) for rows in hidden])
        return [
            item._replace(
                projected=rows,
                keys=given.keys,
                object_attention=given.object_attention,
                grids=plan.tokens.grids,
                seed=plan.media_key[0],
            )
            for item, rows, given, plan in zip(
                self._signals.candidates(features, plans), projected, features, plans, strict=True
            )
        ]

    def _features(
        self, model: PrunableModel, items: list[int], plans: Sequence[ItemPlan]
    ) -> tuple[list[MediaFeatures], dict[MediaKey, MediaFeatures]]:
        """Tower outputs of each item, and those among them that the cache does not have yet.

        The tower runs once for each media, however many items share it.
        """
        media = [plans[i].media_key for i in items]
        cached = {key: self._cache.get(key) for key in media}
        missing = {key: i for key, i in zip(media, items, strict=True) if cached[key] is None}
        encoded = {}
        if missing:
            encoded = dict(zip(missing, model.encode(list(missing.values())), strict=True))
        return [cached[key] or encoded[key] for key in media], encoded

# SPDX-License-Identifier: Apache-2.0
"""The images or videos of one call, for the general adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anchorprune_vllm.item_fields import cut_between_frames, items_of, joined
from anchorprune_vllm.log import logger
from anchorprune_vllm.models.general.data_parallel_tower import tapped_on_all_ranks
from anchorprune_vllm.models.general.tower_signals import Parts
from anchorprune_vllm.plan import ItemPlan, MediaTokens
from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.signals.features import MediaFeatures
from anchorprune_vllm.worker.positions import MediaPositions

if TYPE_CHECKING:
    from anchorprune_vllm.models.general.adapter import GeneralModel

_NOT_TO_BE_HAD = (
    "the attention of the vision tower cannot be read for some items (padded ones, or ones with an "
    "unknown grid); their importance comes from the rows instead"
)


class GeneralMedia:
    """The items of one call of a general model, as a `MediaBatch`."""

    project: Callable[[Tensor], Tensor] | None = None  # rows are embeddings already

    def __init__(
        self,
        model: GeneralModel,
        modality: str,
        kwargs: dict[str, Any],
        plans: Sequence[ItemPlan],
    ) -> None:
        self._model = model
        self._modality = modality
        self._kwargs = kwargs
        self._plans = plans
        self._items = items_of(kwargs, [plan.slices for plan in plans])

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        tower = self._model.tower_signals
        if tower.needed and not tower.is_stated:
            # Whether the tower's attention can be read may depend on an item, but must not depend
            # on others in its batch.
            return [features for item in items for features in self._encode([item])]
        return self._encode(items)

    def _encode(self, items: list[int]) -> list[MediaFeatures]:
        media = [self._plans[i].tokens for i in items]
        rows, signals = self._rows_and_signals(items, media)
        if signals is None:
            signals = [self._signals_of_rows(part) for part in rows]
        return [
            MediaFeatures(embeddings=part, **found)
            for part, found in zip(rows, signals, strict=True)
        ]

    def _rows_and_signals(
        self, items: list[int], media: Sequence[MediaTokens]
    ) -> tuple[list[Tensor], Sequence[Parts] | None]:
        """Return the candidate rows of items and their signals, or None for all signals."""
        tower = self._model.tower_signals
        if self._model.has_data_parallel_tower and tower.needed:
            with tapped_on_all_ranks(tower) as take_apart:
                rows = self._candidates(items, media)
            return take_apart(rows)
        with tower.tapped() as take:
            rows = self._candidates(items, media)
        found = take(media)
        if found is None:
            return rows, None
        sizes = [tokens.candidates for tokens in media]
        parts = {name: part.split(sizes) for name, part in found.items()}
        return rows, [{name: parts[name][i] for name in parts} for i in range(len(items))]

    def _signals_of_rows(self, rows: Tensor) -> Parts:
        """Return what replaces the signals of the tower where they cannot be read."""
        if "importance" not in self._model.needs:
            return {}
        if self._model.tower_signals.order is not None:
            logger.warning_once("AnchorPrune: %s", _NOT_TO_BE_HAD)
        return {"importance": distance_from_mean(rows[:, : self._model.embedding_size])}

    def _candidates(self, items: list[int], media: Sequence[MediaTokens]) -> list[Tensor]:
        rows = self.embed_unpruned(items) if len(items) > 1 else [self._embed_in_parts(*items)]
        return [self.candidate_rows(*each) for each in zip(media, rows, strict=True)]

    def _embed_in_parts(self, item: int) -> Tensor:
        """Return the rows of an item.

        The tower gets a long video in parts, no larger than in an unpruned engine.
        """
        tokens = self._plans[item].tokens
        frames = len(tokens.unit_sizes)
        at_once = max(1, self._model._max_encoder_tokens * frames // tokens.unpruned)
        parts = cut_between_frames(self._items[item], self._modality, frames, at_once)
        rows = [self._model.embed_unpruned(**joined([part]))[0] for part in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def candidate_rows(self, tokens: MediaTokens, rows: Tensor) -> Tensor:
        """Return the rows of an unpruned item that are candidates."""
        chosen = self._model.candidates(tokens)
        return rows if chosen is None else rows[to_device(chosen, rows.device)]

    def embed_unpruned(self, items: list[int]) -> Sequence[Tensor]:
        is_all = len(items) == len(self._items)
        chosen = self._kwargs if is_all else joined([self._items[i] for i in items])
        return list(self._model.embed_unpruned(**chosen))

    def positions(self, item: int, plan: ItemPlan) -> MediaPositions | None:
        return self._model.positions_of(self._modality, self._items[item], plan)


def distance_from_mean(rows: Tensor) -> Tensor:
    """Return how far each row [N, H] is from the mean row, as importance without attention."""
    unit = F.normalize(rows.float(), dim=-1)
    return (1 - unit @ F.normalize(unit.mean(0), dim=0)).clamp_min(0)

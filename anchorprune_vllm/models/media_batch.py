# SPDX-License-Identifier: Apache-2.0
"""The images or videos of one model call, for a model of which nothing is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from anchorprune_vllm.feature_cache import MediaFeatures
from anchorprune_vllm.field_slices import items_of, joined
from anchorprune_vllm.logger import logger
from anchorprune_vllm.plan import ItemPlan, MediaTokens
from anchorprune_vllm.positions import MediaPositions
from anchorprune_vllm.selection.host import to_device

if TYPE_CHECKING:
    from anchorprune_vllm.models.general import GeneralModel

_NOT_TO_BE_HAD = (
    "the attention of the vision tower cannot be read for some items (padded ones, or those of an "
    "unknown grid); their importance comes from the rows instead"
)


class MediaBatch:
    """The items of one call, as the pruner asks for them."""

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
        media = [self._plans[i].tokens for i in items]
        if "importance" not in self._model.needs:
            return [MediaFeatures(rows) for rows in self._candidates(items, media)]
        with self._model.tower_importance.tapped() as take:
            rows = self._candidates(items, media)
        importance = take(media)
        if importance is None:
            if self._model.tower_importance.order is not None:
                logger.warning_once("AnchorPrune: %s", _NOT_TO_BE_HAD)
            width = self._model.embedding_size
            importance = [distance_from_mean(part[:, :width]) for part in rows]
        return [MediaFeatures(*item) for item in zip(rows, importance, strict=True)]

    def _candidates(self, items: list[int], media: Sequence[MediaTokens]) -> list[Tensor]:
        rows = self.embed_whole(items)
        return [self.candidate_rows(*each) for each in zip(media, rows, strict=True)]

    def candidate_rows(self, tokens: MediaTokens, rows: Tensor) -> Tensor:
        """Return those of an unpruned item's rows that are candidates."""
        chosen = self._model.candidates(tokens)
        return rows if chosen is None else rows[to_device(chosen, rows.device)]

    def embed_whole(self, items: list[int]) -> Sequence[Tensor]:
        is_all = len(items) == len(self._items)
        chosen = self._kwargs if is_all else joined([self._items[i] for i in items])
        return list(self._model.embed_unpruned(**chosen))

    def project(self, hidden: Tensor) -> Tensor:
        return hidden  # rows are embeddings already

    def positions(self, item: int, plan: ItemPlan) -> MediaPositions | None:
        return self._model.positions_of(self._modality, self._items[item], plan)


def distance_from_mean(rows: Tensor) -> Tensor:
    """Return how unlike the average row each row [N, H] is: importance without attention."""
    unit = F.normalize(rows.float(), dim=-1)
    return (1 - unit @ F.normalize(unit.mean(0), dim=0)).clamp_min(0)

# SPDX-License-Identifier: Apache-2.0
"""For methods that compare no tokens with words: the vision tower's own outputs, as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from anchorprune_vllm.plan import ItemPlan
from anchorprune_vllm.selection import Candidates
from anchorprune_vllm.worker.feature_cache import MediaFeatures


class PlainSignals:
    """Nothing is computed, and no text encoder is loaded.

    context_of: the rows of an item to the part [N, D] of them that the tower gave.
    """

    def __init__(self, context_of: Callable[[Tensor], Tensor]) -> None:
        self._context_of = context_of

    def candidates(
        self, features: Sequence[MediaFeatures], plans: Sequence[ItemPlan]
    ) -> list[Candidates]:
        """One `Candidates` per item, without relevance."""
        return [
            Candidates(
                relevance=None,
                features=self._context_of(item.hidden),
                importance=item.importance_or_empty,
                budget=plan.kept,
                units=plan.units,
            )
            for item, plan in zip(features, plans, strict=True)
        ]

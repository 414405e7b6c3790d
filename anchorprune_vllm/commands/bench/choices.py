# SPDX-License-Identifier: Apache-2.0
"""What benchmarks select tokens from, and other implementations to compare selection with."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from anchorprune_vllm.budget import min_anchor
from anchorprune_vllm.commands.bench.flops import VICUNA_7B, Transformer
from anchorprune_vllm.selection import AnchorParams, Candidates
from anchorprune_vllm.selection.batch import anchored_units

Selector = Callable[[Candidates], Tensor]
"""Returns the indices of the tokens to keep, ascending."""


@dataclass(frozen=True)
class Choice:
    """Images or videos of one model whose tokens are selected in one call."""

    model: str
    tokens: int  # N of each
    budget: int  # K of each
    anchor_size: int = 768  # width of the features of Stage 1
    context_size: int = 1024  # width of the features of Stage 2
    language_model: Transformer = VICUNA_7B
    units: int = 1
    items: int = 1

    def candidates(
        self, device: torch.device | str, dtype: torch.dtype = torch.bfloat16
    ) -> list[Candidates]:
        """Draw the items at random; features are correlated, as those of neighbouring patches."""

        def features(size: int) -> Tensor:
            shared = torch.randn(-(-self.tokens // 8), size, device=device, dtype=dtype)
            own = torch.randn(self.tokens, size, device=device, dtype=dtype)
            return shared.repeat_interleave(8, 0)[: self.tokens] + 0.5 * own

        units = torch.arange(self.units).repeat_interleave(self.tokens // self.units)
        return [
            Candidates(
                relevance=torch.randn(self.tokens, device=device, dtype=dtype),
                features=features(self.anchor_size),
                importance=torch.rand(self.tokens, device=device, dtype=dtype),
                budget=self.budget,
                context_features=features(self.context_size),
                units=units if self.units > 1 else None,
            )
            for _ in range(self.items)
        ]


def straightforward(item: Candidates) -> Tensor:
    """Select tokens as one would write the method down: a product and an argmax in each step."""
    assert item.relevance is not None
    params = AnchorParams()
    features, context = (F.normalize(x.float(), dim=-1) for x in (item.features, item.context))
    kept: list[int] = []
    for unit in anchored_units(item, params):
        relevance = item.relevance[unit.start : unit.start + unit.size]
        order = (unit.start + relevance.argsort(descending=True)).tolist()
        novel, end = 0, unit.minimum
        while end < unit.maximum and novel < params.patience:
            distance = (1 - features[order[: unit.minimum]] @ features[order[end]]).min()
            novel += int(distance > params.tau)
            end += 1
        kept += order[:end]
    taken = torch.zeros_like(item.importance, dtype=torch.bool)
    taken[kept] = True
    novelty = (1 - context @ context[kept].T).amin(1)
    while len(kept) < item.budget:
        score = (item.importance * novelty).masked_fill(taken, -torch.inf)
        kept.append(int(score.argmax()))
        taken[kept[-1]] = True
        novelty = novelty.minimum(1 - context @ context[kept[-1]])
    return torch.tensor(sorted(kept))


def authors_selector(repository: Path) -> Selector:
    """Load the selector of the paper's authors from a clone of MULTI-cau/AnchorPrune.

    It does not handle several units in one item.
    """
    path = repository / "anchorprune" / "selection.py"
    if not path.exists():
        raise ValueError(f"{path} is not there; give a clone of github.com/MULTI-cau/AnchorPrune")
    names = runpy.run_path(str(path))

    def of_the_authors(item: Candidates) -> Tensor:
        config = names["AnchorPruneConfig"](item.budget, min_anchor(item.budget))
        signals = (item.relevance, item.features, item.importance)
        kept: Tensor = names["anchorprune_select"](*signals, config, item.context_features)[0]
        return kept

    return of_the_authors

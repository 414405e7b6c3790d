# SPDX-License-Identifier: Apache-2.0
"""What benchmarks select tokens from, and other implementations to compare selection with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from anchorprune_vllm.budget import max_anchor, min_anchor, unit_budgets
from anchorprune_vllm.commands.bench.flops import VICUNA_7B, Transformer
from anchorprune_vllm.selection import AnchorParams, Candidates

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
    units = torch.zeros(len(features), dtype=torch.long) if item.units is None else item.units
    sizes = torch.unique_consecutive(units, return_counts=True)[1].tolist()
    kept: list[int] = []
    start = 0
    for size, share in zip(sizes, unit_budgets(item.budget, sizes), strict=True):
        order = (start + item.relevance[start : start + size].argsort(descending=True)).tolist()
        smallest = min_anchor(share)
        largest = max_anchor(share, smallest, params.max_anchor_ratio)
        novel, end = 0, smallest
        while end < largest and novel < params.patience:
            distance = (1 - features[order[:smallest]] @ features[order[end]]).min()
            novel += int(distance > params.tau)
            end += 1
        kept += order[:end]
        start += size
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
    spec = spec_from_file_location("anchorprune_of_the_authors", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise ValueError(f"{path} is not there; give a clone of github.com/MULTI-cau/AnchorPrune")
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)

    def of_the_authors(item: Candidates) -> Tensor:
        config = module.AnchorPruneConfig(item.budget, min_anchor(item.budget))
        kept: Tensor = module.anchorprune_select(
            item.relevance, item.features, item.importance, config, item.context_features
        )[0]
        return kept

    return of_the_authors

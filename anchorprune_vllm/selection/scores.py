# SPDX-License-Identifier: Apache-2.0
"""The scores of Stage 2: importance times novelty, or one of the paper's ablations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anchorprune_vllm.anchor_params import Stage2
from anchorprune_vllm.selection.exact_cosine import working_dtype
from anchorprune_vllm.selection.types import Candidates


class Score(NamedTuple):
    """A score of tokens that depends on their novelty: weight times novelty, or their sum."""

    weight: Tensor  # [N] in the working dtype; not negative, and finite even when doubled
    adds: bool = False

    def of(self, novelty: Tensor) -> Tensor:
        """Return the scores [N], as a new tensor."""
        return self.weight + novelty if self.adds else self.weight * novelty


def score_of(item: Candidates, stage2: Stage2) -> Score:
    """Return the score of an item's tokens for one of the forms of Stage 2."""
    if stage2 == "importance":
        return score_by_importance(item.importance)
    ones = torch.ones_like(item.importance, dtype=working_dtype(item.importance.device))
    if stage2 == "diversity":
        return Score(ones)
    relevance = ones if item.relevance is None else scaled(item.relevance)
    return Score(relevance, adds=stage2 == "additive")


def score_by_importance(importance: Tensor) -> Score:
    """Return the paper's score; importance that is negative or NaN counts as 0."""
    dtype = working_dtype(importance.device)
    largest = torch.finfo(dtype).max / 4  # a score of a larger weight would overflow
    return Score(importance.to(dtype).nan_to_num(nan=0.0).clamp(0, largest))


def scaled(scores: Tensor) -> Tensor:
    """Scale scores [N] to 0..1 in the working dtype; all are 1 if they are equal or not finite."""
    scores = scores.to(working_dtype(scores.device))
    low, high = scores.aminmax()
    return ((scores - low) / (high - low)).nan_to_num(nan=1.0).clamp(0, 1)

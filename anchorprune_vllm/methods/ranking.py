# SPDX-License-Identifier: Apache-2.0
"""Helpers that several methods share: tokens ranked by a score, and results without an anchor."""

from __future__ import annotations

import torch
from torch import Tensor

from anchorprune_vllm.selection.exact_cosine import working_dtype
from anchorprune_vllm.selection.types import Candidates, KeptTokens


def count(item: Candidates) -> int:
    """Return K, which is at most the number of tokens."""
    return min(item.budget, len(item.features))


def check_share(name: str, value: float) -> None:
    """Raise ValueError for an option that is not a share from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}; give a share from 0 to 1")


def by_score(scores: Tensor) -> Tensor:
    """Return all tokens [N] by descending score; ties go to the lower index, and NaN is last."""
    scores = scores.to(working_dtype(scores.device)).nan_to_num(nan=-torch.inf)
    return scores.sort(descending=True, stable=True).indices


def in_native_order(indices: Tensor) -> KeptTokens:
    """Return unchanged tokens in native order, none of them an anchor."""
    return as_given(indices.sort().values)


def as_given(indices: Tensor, weights: Tensor | None = None) -> KeptTokens:
    """Return tokens, or sums of tokens, in the order given, none of them an anchor."""
    return KeptTokens(indices, torch.zeros_like(indices, dtype=torch.bool), weights)


def others(tokens: int, taken: Tensor) -> Tensor:
    """Return the tokens [tokens - M] that are not among the M distinct ones taken, ascending."""
    is_taken = torch.zeros(tokens, dtype=torch.uint8, device=taken.device)
    is_taken[taken] = 1
    return is_taken.sort(stable=True).indices[: tokens - len(taken)]

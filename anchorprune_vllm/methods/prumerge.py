# SPDX-License-Identifier: Apache-2.0
"""PruMerge+ with a fixed budget: important and evenly spaced tokens, merged with neighbours.

"LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models", Shang et al.,
2024. The rule follows 42Shawn/LLaVA-PruMerge, `llava/model/multimodal_encoder/clip_encoder.py`.
There, the count follows from the outliers of attention, and about three times as many evenly spaced
tokens are added. Here, K is given: one row is for the rest, a quarter of the others is chosen by
attention, and three quarters are evenly spaced among the tokens that are left. Keys and attention
are those of the last layer that the model runs, with its heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anchorprune_vllm.methods.ranking import as_given, by_score, count, others
from anchorprune_vllm.methods.registry import method
from anchorprune_vllm.selection.exact_cosine import products, rows_at_once, unit_rows, working_dtype
from anchorprune_vllm.selection.types import Candidates, KeptTokens


@method("importance", "keys")
def prumerge_plus(item: Candidates, *, neighbours: int = 32) -> KeptTokens:
    """Keep tokens plus their nearest `neighbours` by key, and in a last row, the sum of the rest.

    Added tokens are weighted by their importance. The last row has the place of the most important
    token in it. A budget of 1 keeps only the most important token.
    """
    assert item.keys is not None
    if not isinstance(neighbours, int) or neighbours < 0:
        raise ValueError(f"neighbours is {neighbours!r}; give a whole number from 0")
    tokens, total = len(item.features), count(item)
    ranked = by_score(item.importance)
    if total in (1, tokens):
        return as_given(ranked[:total].sort().values)

    # 1. Choose tokens by importance, then at equal steps among the others.
    important = ranked[: max(1, round((total - 1) / 4))]
    free = others(tokens, important)
    spaced = total - 1 - len(important)
    steps = torch.arange(spaced, device=free.device) * len(free) // max(1, spaced)
    kept = torch.cat([important, free[steps]])
    rest = others(tokens, kept)

    # 2. Add to each its nearest tokens by key, kept or not, but not itself.
    keys = unit_rows(item.keys.flatten(1))
    some = kept.split(rows_at_once(tokens))
    near = torch.cat([_nearest(keys, part, min(neighbours, tokens - 1)) for part in some])
    importance = item.importance.to(working_dtype(kept.device))
    weights = torch.zeros(total, tokens, dtype=importance.dtype, device=kept.device)
    weights[:-1].scatter_(1, near, importance[near])
    weights[torch.arange(len(kept), device=kept.device), kept] = 1

    # 3. Merge the rest into one row.
    weights[-1, rest] = importance[rest]
    heaviest = rest[importance[rest].argmax(0, keepdim=True)]
    return as_given(torch.cat([kept, heaviest]), weights)


def _nearest(keys: Tensor, of: Tensor, count: int) -> Tensor:
    """Return, for tokens [M], the other tokens [M, count] with the most similar keys."""
    likeness = products(keys[of], keys).scatter_(1, of[:, None], -torch.inf)
    nearest_first = likeness.sort(dim=1, descending=True, stable=True).indices  # ties: lower index
    return nearest_first[:, :count].clone()  # a view would keep all sorted indices alive

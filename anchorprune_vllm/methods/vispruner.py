# SPDX-License-Identifier: Apache-2.0
"""VisPruner: important tokens, and the least redundant of the others.

"Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in VLMs", Zhang et
al., ICCV 2025. The rule follows Theia-4869/VisPruner, `llava/model/llava_arch.py`. That code needs
even numbers of tokens; here, an odd token belongs to the first half.
"""

from __future__ import annotations

import torch

from anchorprune_vllm.methods.ranking import (
    by_score,
    check_share,
    count,
    in_native_order,
)
from anchorprune_vllm.methods.registry import method
from anchorprune_vllm.selection.exact_cosine import products, rows_at_once, unit_rows
from anchorprune_vllm.selection.types import Candidates, KeptTokens

_DROPPED_AT_ONCE = 8


@method("importance")
def vispruner(item: Candidates, *, important_ratio: float = 0.5) -> KeptTokens:
    """Select a share of the budget by importance, and the rest by repeated matching.

    The tokens that are left, by descending importance, are split into those at even and at odd
    places. Up to 8 of the even ones, those with the nearest match among the odd ones, are dropped.
    The other even ones follow in the order of that similarity, and then the odd ones. This repeats
    until the budget is met.
    """
    check_share("important_ratio", important_ratio)
    rows = unit_rows(item.context)
    total = count(item)
    important = int(total * important_ratio)
    ranked = by_score(item.importance)
    if important == total:
        return in_native_order(ranked[:total])
    left = ranked[important:]
    while (dropped := min(_DROPPED_AT_ONCE, len(left) - (total - important))) > 0:
        even, odd = left[::2], left[1::2]
        some = even.split(rows_at_once(len(odd)))
        likeness = torch.cat([products(rows[part], rows[odd]).amax(1) for part in some])
        left = torch.cat([even[by_score(likeness)[dropped:]], odd])
    return in_native_order(torch.cat([ranked[:important], left]))

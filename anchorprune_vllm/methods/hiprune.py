# SPDX-License-Identifier: Apache-2.0
"""HiPrune: the attention of a middle layer finds objects, and that of a deep one fills the rest.

"HiPrune: Training-Free Visual Token Pruning via Hierarchical Attention in Vision-Language Models",
Liu et al., 2025. The rule follows Danielement321/HiPrune, `LLaVA/llava/model/llava_arch.py`. Deep
attention is the tower's importance here, which is that of [CLS] if there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anchorprune_vllm.methods.ranking import (
    by_score,
    check_share,
    count,
    in_native_order,
)
from anchorprune_vllm.methods.registry import method
from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.selection.exact_cosine import working_dtype
from anchorprune_vllm.selection.types import Candidates, KeptTokens


@method("importance", "object_attention")
def hiprune(item: Candidates, *, alpha: float = 0.1) -> KeptTokens:
    """Select round(K * alpha / 5) tokens by object attention, their neighbours, and important ones.

    Neighbours are the tokens above, below, left and right in the same unit, as far as they exist.
    If there is no room for all of them, the most important ones are kept. The rest of the budget
    goes by importance.
    """
    assert item.object_attention is not None
    check_share("alpha", alpha)
    total = count(item)
    anchors = by_score(item.object_attention)[: round(total * alpha / 5)]
    neighbours = to_device(_neighbours(item), anchors.device)[anchors]
    # Anchors (rank 2) and neighbours (rank 1) come first, whatever their importance is.
    rank = torch.zeros_like(item.importance, dtype=working_dtype(anchors.device))
    rank[neighbours.flatten()] = 1
    rank[anchors] = 2
    order = by_score(item.importance)
    then = rank[order].sort(descending=True, stable=True).indices
    return in_native_order(order[then][:total])


def _neighbours(item: Candidates) -> Tensor:
    """Return the neighbours [N, 4] on the CPU; a token at an edge is its own neighbour there."""
    found = []
    start = 0
    for rows, columns in item.grids or ((1, len(item.features)),):
        if not rows * columns:
            continue  # an empty unit cannot be padded
        number = torch.arange(rows * columns).view(1, rows, columns) + start
        start += rows * columns
        padded = torch.nn.functional.pad(number.double(), (1, 1, 1, 1), mode="replicate").long()[0]
        sides = [padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]]
        found.append(torch.stack(sides, dim=-1).flatten(0, 1))
    return torch.cat(found)

# SPDX-License-Identifier: Apache-2.0
"""DivPrune: tokens as far apart as possible.

"DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models", Alvar et al., CVPR
2025. The rule follows vbdi/divprune, `LLaVA/llava/model/llava_arch.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anchorprune_vllm.methods.ranking import count, in_native_order
from anchorprune_vllm.methods.registry import method
from anchorprune_vllm.selection.exact_cosine import (
    distances,
    rows_at_once,
    unit_rows,
    working_dtype,
)
from anchorprune_vllm.selection.kernels import expand_item
from anchorprune_vllm.selection.scores import Score
from anchorprune_vllm.selection.types import Candidates, KeptTokens


@method("projected")
def divprune(item: Candidates) -> KeptTokens:
    """Select the token farthest from its nearest neighbour, then those farthest from all kept."""
    assert item.projected is not None
    first = _loneliest(unit_rows(item.projected))
    anchor = torch.zeros_like(item.projected[:, 0], dtype=torch.bool).index_fill_(0, first, True)
    farthest = Score(torch.ones_like(anchor, dtype=working_dtype(anchor.device)))
    return in_native_order(expand_item(item.projected, farthest, anchor, count(item)))


def _loneliest(rows: Tensor) -> Tensor:
    """Return the token [1] with the largest distance to its nearest neighbour.

    Distances are computed in blocks, so there is never an N x N matrix.
    """
    nearest = []
    at_once = rows_at_once(len(rows))
    for start in range(0, len(rows), at_once):
        (block,) = distances(rows[None, start : start + at_once], rows[None])
        block.diagonal(start).fill_(torch.inf)
        nearest.append(block.amin(1))
    return torch.cat(nearest).argmax(0, keepdim=True)

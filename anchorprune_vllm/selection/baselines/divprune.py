# SPDX-License-Identifier: Apache-2.0
"""DivPrune: tokens as far apart as possible.

"DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models", Alvar et al., CVPR
2025; rule of vbdi/divprune `LLaVA/llava/model/llava_arch.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anchorprune_vllm.methods import method
from anchorprune_vllm.selection.baselines.ranking import count, in_native_order
from anchorprune_vllm.selection.candidates import Candidates, KeptTokens
from anchorprune_vllm.selection.cosine import distances, half_squares, rows_at_once, unit_rows
from anchorprune_vllm.selection.expand import Worth
from anchorprune_vllm.selection.host import to_device
from anchorprune_vllm.selection.kernels import device_expansion


@method("projected")
def divprune(item: Candidates) -> KeptTokens:
    """The token farthest from its nearest neighbour, then always the one farthest from all kept."""
    assert item.projected is not None
    rows = unit_rows(item.projected)
    first = _loneliest(rows)
    taken = torch.zeros(len(rows), dtype=torch.bool, device=rows.device).index_fill_(0, first, True)
    novelty = distances(rows[None], rows[None, first]).flatten()
    farthest = Worth(torch.ones_like(novelty)[None])
    steps = count(item) - 1
    (rest,) = device_expansion(rows.device)(
        rows[None], farthest, novelty[None], taken[None], to_device([steps], rows.device), steps
    )
    return in_native_order(torch.cat([first, rest]))


def _loneliest(rows: Tensor) -> Tensor:
    """[1]: the token with the largest distance to its nearest neighbour. Never holds N x N."""
    nearest = []
    halves = half_squares(rows)
    at_once = rows_at_once(len(rows))
    for start in range(0, len(rows), at_once):
        some = slice(start, start + at_once)
        (block,) = distances(rows[None, some], rows[None], halves[None, some], halves[None])
        block.diagonal(start).fill_(torch.inf)
        nearest.append(block.amin(1))
    return torch.cat(nearest).argmax(0, keepdim=True)

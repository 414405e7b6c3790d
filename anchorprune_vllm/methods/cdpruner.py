# SPDX-License-Identifier: Apache-2.0
"""CDPruner: a determinantal point process on relevance and similarity.

"Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs",
Zhang et al., NeurIPS 2025. The rule follows Theia-4869/CDPruner, `llava/model/llava_arch.py`, and
uses the greedy search of Chen et al., "Fast Greedy MAP Inference for Determinantal Point Process",
2018.
"""

from __future__ import annotations

import torch

from anchorprune_vllm.methods.ranking import count, in_native_order
from anchorprune_vllm.methods.registry import method
from anchorprune_vllm.selection.exact_cosine import products, unit_rows
from anchorprune_vllm.selection.types import Candidates, KeptTokens

_LEAST_RELEVANT = 1e-6  # as in the original code, so that no token has relevance 0
_SMALLEST_GAIN = 1e-10  # below this, the kept tokens span a token already


@method("projected", uses_query=True)
def cdpruner(item: Candidates) -> KeptTokens:
    """Select greedily the set with the largest determinant of diag(r) S diag(r).

    Here r is the relevance, scaled to 0..1 over the item (1 without a query), and S has the cosines
    of projected tokens. Rows of this kernel are computed when needed, so memory is [K, N].
    """
    assert item.projected is not None
    rows = unit_rows(item.projected)
    relevance = torch.ones_like(rows[:, 0])
    if item.relevance is not None:
        scores = item.relevance.to(rows.dtype)
        low, high = scores.aminmax()
        relevance = ((scores - low + _LEAST_RELEVANT) / (high - low)).nan_to_num(1.0, posinf=1.0)
    total = count(item)
    bases = rows.new_zeros(total, len(rows))  # orthogonal parts of the rows chosen so far
    gains = relevance.square() * rows.any(1)  # at first r^2, as the cosine with itself is 1
    taken = torch.zeros_like(gains, dtype=torch.bool)
    choices = torch.empty(total, dtype=torch.int64, device=rows.device)
    for step in range(total):
        choice = gains.masked_fill(taken, -torch.inf).argmax(0, keepdim=True)
        choices[step : step + 1] = choice
        taken[choice] = True
        kernel_row = relevance[choice] * relevance * products(rows, rows[choice])[:, 0]
        before = bases[:step]
        basis = kernel_row - torch.mv(before.T, before[:, choice].squeeze(1))
        bases[step] = basis / gains[choice].clamp_min(_SMALLEST_GAIN).sqrt()
        gains = gains - bases[step].square()
    return in_native_order(choices)

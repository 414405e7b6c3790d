# SPDX-License-Identifier: Apache-2.0
"""SCOPE: tokens that cover the others, weighted by attention.

"SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodal LLMs", Deng et al.,
NeurIPS 2025; rule of kinredon/SCOPE `scope/clip_encoder.py`. As there, memory is N x N.
"""

from __future__ import annotations

import torch

from anchorprune_vllm.methods import method
from anchorprune_vllm.selection.baselines.ranking import count, in_native_order
from anchorprune_vllm.selection.candidates import Candidates, KeptTokens
from anchorprune_vllm.selection.cosine import GRID, unit_rows


@method("importance")
def scope(item: Candidates, *, alpha: float = 1.0) -> KeptTokens:
    """Always the token that adds most coverage, times importance to the power of `alpha`.

    A token is covered as well as by its most similar kept token; coverage starts at 0.
    """
    rows = unit_rows(item.context)
    # Multiples of 1 / GRID: their sums are exact, and copies of a token tie wherever they are.
    cosines = (rows @ rows.T).mul_(GRID).round_().mul_(1 / GRID)
    weight = item.importance.to(torch.float64) ** alpha
    covered = torch.zeros_like(weight)
    taken = torch.zeros_like(weight, dtype=torch.bool)
    choices = torch.empty(count(item), dtype=torch.int64, device=rows.device)
    for step in range(len(choices)):
        gains = (cosines - covered[:, None]).clamp_min_(0).sum(0) * weight
        choice = gains.masked_fill(taken, -torch.inf).argmax(0, keepdim=True)
        choices[step : step + 1] = choice
        taken[choice] = True
        covered = covered.maximum(cosines[:, choice].squeeze(1))
    return in_native_order(choices)

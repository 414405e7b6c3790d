# SPDX-License-Identifier: Apache-2.0
"""SCOPE: tokens that cover the others, weighted by attention.

"SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodal LLMs", Deng et al.,
NeurIPS 2025. The rule follows kinredon/SCOPE, `scope/clip_encoder.py`. As there, memory is N x N,
hence the limit.
"""

from __future__ import annotations

import torch

from anchorprune_vllm.methods.ranking import count, in_native_order
from anchorprune_vllm.methods.registry import method
from anchorprune_vllm.selection.exact_cosine import (
    GRID,
    products,
    rows_at_once,
    unit_rows,
    working_dtype,
)
from anchorprune_vllm.selection.types import Candidates, KeptTokens

MOST_TOKENS = 2**14
"""The most tokens of an item; the cosines of this many take 1 GiB."""


@method("importance", most_tokens=MOST_TOKENS)
def scope(item: Candidates, *, alpha: float = 1.0) -> KeptTokens:
    """Select, one by one, the token with the most added coverage times importance ** `alpha`.

    The coverage of a token is its cosine with the most similar kept token, and starts at 0.
    """
    rows = unit_rows(item.context)
    blocks = range(0, len(rows), at_once := rows_at_once(len(rows)))
    # Cosines are rounded to multiples of 1 / GRID, which float32 holds. Their sums are then exact
    # on a CPU, and copies of a token tie wherever they are.
    cosines = torch.empty(len(rows), len(rows), device=rows.device, dtype=torch.float32)
    for start in blocks:
        some = slice(start, start + at_once)
        cosines[some] = products(rows[some], rows).mul_(GRID).round_().mul_(1 / GRID).clamp_max_(1)
    weight = item.importance.to(working_dtype(rows.device)) ** alpha
    covered = torch.zeros(len(rows), device=rows.device, dtype=torch.float32)
    taken = torch.zeros_like(weight, dtype=torch.bool)
    choices = torch.empty(count(item), dtype=torch.int64, device=rows.device)
    for step in range(len(choices)):
        gains = torch.zeros_like(weight)
        for start in blocks:
            some = slice(start, start + at_once)
            added = (cosines[some] - covered[some, None]).clamp_min_(0)
            gains += added.sum(0, dtype=weight.dtype)
        choice = (gains * weight).masked_fill(taken, -torch.inf).argmax(0, keepdim=True)
        choices[step : step + 1] = choice
        taken[choice] = True
        covered = covered.maximum(cosines[:, choice].squeeze(1))
    return in_native_order(choices)

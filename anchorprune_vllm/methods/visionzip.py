# SPDX-License-Identifier: Apache-2.0
"""VisionZip: dominant tokens by attention, and contextual ones into which the rest is merged.

"VisionZip: Longer is Better but Not Necessary in Vision Language Models", Yang et al., CVPR 2025.
The rule follows dvlab-research/VisionZip, `visionzip/clip_encoder.py`. The original keeps the [CLS]
token as a dominant one. The served models have no such visual token, so one more patch is kept.
"""

from __future__ import annotations

import torch

from anchorprune_vllm.methods.ranking import (
    as_given,
    by_score,
    check_share,
    count,
    others,
)
from anchorprune_vllm.methods.registry import method
from anchorprune_vllm.selection.exact_cosine import products, rows_at_once, unit_rows, working_dtype
from anchorprune_vllm.selection.types import Candidates, KeptTokens


@method("importance", "keys")
def visionzip(item: Candidates, *, contextual_share: float = 10 / 64) -> KeptTokens:
    """Keep dominant tokens unchanged, and contextual ones, each plus the mean of its group.

    Contextual tokens are taken at equal steps from those that are not dominant. Each of the others
    joins the contextual token with the most similar key, summed over heads.
    """
    assert item.keys is not None
    check_share("contextual_share", contextual_share)
    tokens, total = len(item.features), count(item)
    contextual = round(total * contextual_share)
    dominant = by_score(item.importance)[: total - contextual].sort().values
    if not contextual:
        return as_given(dominant)

    # 1. Choose the contextual tokens, and the one that each of the others joins.
    rest = others(tokens, dominant)
    step = max(1, len(rest) // contextual)
    targets = rest[::step][:contextual]
    indices = torch.cat([dominant, targets])
    joining = others(tokens, indices)
    dtype = working_dtype(dominant.device)
    keys = unit_rows(item.keys.to(dtype).sum(1))
    some = joining.split(rows_at_once(len(targets)))
    group = torch.cat([products(keys[part], keys[targets]).argmax(1) for part in some])

    # 2. Add the mean of each group to its contextual token.
    weights = torch.zeros(total, tokens, dtype=dtype, device=dominant.device)
    weights[len(dominant) + group, joining] = 1
    weights /= weights.sum(1, keepdim=True).clamp_min(1)
    weights[torch.arange(total, device=indices.device), indices] = 1
    return as_given(indices, weights)

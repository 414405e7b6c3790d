# SPDX-License-Identifier: Apache-2.0
"""Select which visual tokens to keep; needs torch and nothing of vLLM.

Start with `anchorprune.py`, which is the method as in the paper.
"""

from anchorprune_vllm.anchor_params import AnchorParams
from anchorprune_vllm.selection.batch import anchor_prune, anchor_prune_batch, select_batch
from anchorprune_vllm.selection.types import Candidates, KeptTokens

__all__ = [
    "AnchorParams",
    "Candidates",
    "KeptTokens",
    "anchor_prune",
    "anchor_prune_batch",
    "select_batch",
]

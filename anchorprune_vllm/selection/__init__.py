# SPDX-License-Identifier: Apache-2.0
"""Which visual tokens to keep. Needs torch and nothing of vLLM.

`anchorprune.py` is the method as in the paper; start there.
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

# SPDX-License-Identifier: Apache-2.0
"""Which visual tokens to keep. Needs torch and nothing of vLLM."""

from anchorprune_vllm.selection.candidates import AnchorParams, Candidates, KeptTokens
from anchorprune_vllm.selection.select import anchor_prune, anchor_prune_batch, select_batch

__all__ = [
    "AnchorParams",
    "Candidates",
    "KeptTokens",
    "anchor_prune",
    "anchor_prune_batch",
    "select_batch",
]

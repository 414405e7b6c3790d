# SPDX-License-Identifier: Apache-2.0
"""FasterVLM: the tokens with the highest [CLS] attention.

"[CLS] Attention is All You Need for Training-Free Visual Token Pruning", Zhang et al., 2024. The
rule follows Theia-4869/FasterVLM, `llava/model/llava_arch.py`. Attention here is the importance of
the tower: the attention of [CLS] if there is one, and otherwise that received from all tokens.
"""

from __future__ import annotations

from anchorprune_vllm.methods.ranking import by_score, count, in_native_order
from anchorprune_vllm.methods.registry import method
from anchorprune_vllm.selection.types import Candidates, KeptTokens


@method("importance")
def fastervlm(item: Candidates) -> KeptTokens:
    """Select the K most important tokens."""
    return in_native_order(by_score(item.importance)[: count(item)])

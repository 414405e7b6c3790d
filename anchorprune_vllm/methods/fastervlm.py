# SPDX-License-Identifier: Apache-2.0
"""FasterVLM: the tokens with the highest [CLS] attention.

"[CLS] Attention is All You Need for Training-Free Visual Token Pruning", Zhang et al., 2024;
rule of Theia-4869/FasterVLM `llava/model/llava_arch.py`. Here attention is the tower's importance:
of [CLS] where there is one, received from all tokens elsewhere.
"""

from __future__ import annotations

from anchorprune_vllm.methods.ranking import by_score, count, in_native_order
from anchorprune_vllm.methods.registry import method
from anchorprune_vllm.selection.types import Candidates, KeptTokens


@method("importance")
def fastervlm(item: Candidates) -> KeptTokens:
    """The K most important tokens."""
    return in_native_order(by_score(item.importance)[: count(item)])

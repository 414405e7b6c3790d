# SPDX-License-Identifier: Apache-2.0
"""Relevance by matching visual tokens with words in the language model's own embedding space.

For models whose vision tower has no text tower beside it. A visual token is as relevant as its best
match among the tokens of the question, or, to compare, as its mean match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from anchorprune_vllm.config import Matching
from anchorprune_vllm.feature_cache import MediaFeatures
from anchorprune_vllm.plan import ItemPlan
from anchorprune_vllm.selection import Candidates

_WORDS_AT_ONCE = 256


class MatchingSignals:
    """Signals of models that project visual tokens among the embeddings of words.

    embed_words: token ids [M] on the CPU to embeddings [M, H]; under tensor parallelism the same on
    all ranks.
    """

    def __init__(self, embed_words: Callable[[Tensor], Tensor], matching: Matching = "max") -> None:
        self._embed_words = embed_words
        self._match = {"max": best_match, "mean": mean_match}[matching]

    def candidates(
        self, features: Sequence[MediaFeatures], plans: Sequence[ItemPlan]
    ) -> list[Candidates]:
        """One `Candidates` per item; the words of all questions are embedded together."""
        asked = [i for i, plan in enumerate(plans) if plan.query_ids.numel()]
        words_of: dict[int, Tensor] = {}
        if asked:
            ids = [plans[i].query_ids.flatten() for i in asked]
            words = F.normalize(self._embed_words(torch.cat(ids)).float(), dim=-1)
            words_of = dict(zip(asked, words.split([len(part) for part in ids]), strict=True))
        return [
            Candidates(
                relevance=self._match(item.hidden, words_of[i]) if i in words_of else None,
                features=item.hidden,
                importance=item.importance_or_empty,
                budget=plan.kept,
                units=plan.units,
            )
            for i, (item, plan) in enumerate(zip(features, plans, strict=True))
        ]


def best_match(tokens: Tensor, words: Tensor) -> Tensor:
    """Highest cosine of each token [N, H] with any word [M, H], normalised: float32 [N]."""
    tokens = F.normalize(tokens.float(), dim=-1)
    best = [(tokens @ part.T).amax(1) for part in words.split(_WORDS_AT_ONCE)]
    return torch.stack(best).amax(0)


def mean_match(tokens: Tensor, words: Tensor) -> Tensor:
    """Mean cosine of each token [N, H] with the words [M, H], normalised: float32 [N]."""
    return F.normalize(tokens.float(), dim=-1) @ words.mean(0)

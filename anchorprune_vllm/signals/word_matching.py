# SPDX-License-Identifier: Apache-2.0
"""Relevance by matching visual tokens with words in the language model's own embedding space.

This is for models whose vision tower has no text tower. A visual token is as relevant as its best
match among the tokens of the question, or, for comparison, as its mean match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from anchorprune_vllm.config import Matching
from anchorprune_vllm.signals.features import MediaFeatures

EmbedWords = Callable[[Tensor], Tensor]
"""A function from token ids [M] on the CPU to embeddings [M, H]."""

_WORDS_AT_ONCE = 512
"""The words that are embedded at a time; a question may be as long as the model's context."""


class WordMatching:
    """Relevance for models that project visual tokens into the space of word embeddings.

    Args:
        embed_words: A function from token ids [M] on the CPU to embeddings [M, H]. Under tensor
            parallelism it must return the same on all ranks.
        matching: How a token is compared with several words.
        size: H, if rows are wider than that, as with the levels of DeepStack; None otherwise.
    """

    def __init__(
        self, embed_words: EmbedWords, matching: Matching = "max", size: int | None = None
    ) -> None:
        self._embed_words = embed_words
        self._size = size
        self._match = {"max": best_match, "mean": mean_match}[matching]

    def __call__(
        self, features: Sequence[MediaFeatures], questions: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the relevance [N] of each item's tokens, or None for an item without question.

        The words of all questions are embedded together, a limited number at a time.
        """
        relevance: list[Tensor | None] = [None] * len(features)
        asked = [i for i, question in enumerate(questions) if question.numel()]
        if not asked:
            return relevance
        ids = torch.cat([questions[i].flatten() for i in asked])
        for start in range(0, len(ids), _WORDS_AT_ONCE):
            words = self._embed_words(ids[start : start + _WORDS_AT_ONCE])
            words = F.normalize(words.float(), dim=-1)
            first = 0  # index of the item's first word among those of all items
            for i in asked:
                total = questions[i].numel()
                part = words[max(0, first - start) : max(0, first + total - start)]
                if len(part):
                    tokens = features[i].rows[:, : self._size]
                    relevance[i] = self._match(tokens, part, total, relevance[i])
                first += total
        return relevance


def best_match(tokens: Tensor, words: Tensor, total: int, so_far: Tensor | None) -> Tensor:
    """Return the highest cosine of each token with any word of its question.

    Args:
        tokens: The visual tokens, [N, H].
        words: Some of the words of the question, normalised, [M, H].
        total: The number of words of the whole question.
        so_far: The result for earlier words of the question, or None for the first ones.

    Returns:
        The cosines, float32 [N].
    """
    best = (F.normalize(tokens.float(), dim=-1) @ words.T).amax(1)
    return best if so_far is None else so_far.maximum(best)


def mean_match(tokens: Tensor, words: Tensor, total: int, so_far: Tensor | None) -> Tensor:
    """Return the mean cosine of each token with the words; arguments are as in `best_match`."""
    mean = torch.mv(F.normalize(tokens.float(), dim=-1), words.sum(0) / total)
    return mean if so_far is None else so_far + mean

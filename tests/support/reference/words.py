# SPDX-License-Identifier: Apache-2.0
"""Models whose visual tokens are compared with words in the language model's own space."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.reference.base import Reference
from tests.support.reference.selection import Tokens, normalised


class WordMatchingReference(Reference):
    """A candidate is as relevant as its best match among the words of the question."""

    @abstractmethod
    def received_attention(self, media: Any) -> np.ndarray:
        """Importance of each candidate: [N]."""

    def unpruned(self, media: Any) -> int:
        return sum(self.unit_sizes(media))

    def _tokens(self, media: Any) -> Tokens:
        features = normalised(self._rows(media).double().numpy())
        sizes = self.unit_sizes(media)
        return Tokens(
            importance=self.received_attention(media),
            features=features,
            context=features,
            units=np.repeat(np.arange(len(sizes)), sizes),
        )

    def _rows(self, media: Any) -> Tensor:
        """Candidates in the space of words: [N, H]."""
        return self.embed(media)

    def _relevance(self, tokens: Tokens, question: str) -> np.ndarray:
        return self._matches(tokens, question).max(axis=1)

    def _matches(self, tokens: Tokens, question: str) -> np.ndarray:
        """Cosines [N, words]."""
        ids = self.tokenizer(question, add_special_tokens=False).input_ids
        words = self.model.get_input_embeddings()(torch.tensor(ids)).double().numpy()
        return tokens.features @ normalised(words).T

# SPDX-License-Identifier: Apache-2.0
"""The features of an image or video, and the interface that compares them with a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class MediaFeatures:
    """The features of one image or video that selection needs, whatever the question is.

    Each field has a row for every candidate. A field is None if the model has no such rows or the
    method does not need them; `context` or `embeddings` is always present.
    """

    context: Tensor | None = None
    """The tower's rows [N, D2], in which Stage 2 measures novelty; without them, it uses the
    embeddings."""
    aligned: Tensor | None = None
    """The rows [N, D1] in the space of the question's text encoder, if there is one."""
    embeddings: Tensor | None = None
    """The rows of the language model, [N, H or more], if the tower provides them. Otherwise those
    of the kept tokens are projected from `context`."""
    importance: Tensor | None = None
    """The importance of each token, float32 [N]."""
    keys: Tensor | None = None
    """The keys of the tower's attention, [N, heads, head size]."""
    object_attention: Tensor | None = None
    """The attention received in the layer in which HiPrune finds objects, float32 [N]."""

    @property
    def rows(self) -> Tensor:
        """Return the rows of the language model, or those that are projected to them."""
        rows = self.context if self.embeddings is None else self.embeddings
        assert rows is not None
        return rows

    def parts(self) -> dict[str, Tensor]:
        """Return the fields that are not None, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def regrouped(self, split: Callable[[Tensor], Sequence[Tensor]]) -> list[MediaFeatures]:
        """Return one `MediaFeatures` for each group into which `split` divides a field."""
        groups = {name: split(part) for name, part in self.parts().items()}
        return [
            MediaFeatures(**dict(zip(groups, group, strict=True)))
            for group in zip(*groups.values(), strict=True)
        ]

    @classmethod
    def joined(cls, pieces: Sequence[MediaFeatures]) -> MediaFeatures:
        """Return the features of all pieces, concatenated."""
        names = pieces[0].parts()
        return cls(**{name: torch.cat([getattr(p, name) for p in pieces]) for name in names})


class Relevance(Protocol):
    """A function that compares the images and videos of one call with their questions."""

    def __call__(
        self, features: Sequence[MediaFeatures], questions: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the relevance [N] of each item's tokens, or None for an item without question.

        `questions` has the token ids [segments, length] of each item's question, on the CPU.
        """

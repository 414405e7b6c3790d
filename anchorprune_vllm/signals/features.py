# SPDX-License-Identifier: Apache-2.0
"""What a vision tower tells of one image or video, and what compares it with a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class MediaFeatures:
    """What selection needs of one image or video: it depends on the media, and on no question.

    Each field has a row for every candidate. It is None if the model has no such rows, or the
    method does not need them; `context` or `embeddings` is always there.
    """

    context: Tensor | None = None
    """[N, D2]: rows of the tower, in which Stage 2 measures novelty; None: the embeddings serve."""
    aligned: Tensor | None = None
    """[N, D1]: the rows in the space of the question's text encoder, where there is one."""
    embeddings: Tensor | None = None
    """[N, H and more]: rows of the language model, where the tower gives them. Otherwise those of
    the kept tokens are made of `context`."""
    importance: Tensor | None = None
    """[N] float32."""
    keys: Tensor | None = None
    """[N, heads, head size]."""
    object_attention: Tensor | None = None
    """[N] float32."""

    @property
    def rows(self) -> Tensor:
        """The rows that are, or become, the rows of the language model."""
        rows = self.context if self.embeddings is None else self.embeddings
        assert rows is not None
        return rows

    def parts(self) -> dict[str, Tensor]:
        """Return the fields that are there."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def regrouped(self, split: Callable[[Tensor], Sequence[Tensor]]) -> list[MediaFeatures]:
        """Return one `MediaFeatures` for each group that `split` makes of a field."""
        groups = {name: split(part) for name, part in self.parts().items()}
        return [
            MediaFeatures(**dict(zip(groups, group, strict=True)))
            for group in zip(*groups.values(), strict=True)
        ]

    @classmethod
    def joined(cls, pieces: Sequence[MediaFeatures]) -> MediaFeatures:
        """Return the tokens of all pieces, one behind the other."""
        names = pieces[0].parts()
        return cls(**{name: torch.cat([getattr(p, name) for p in pieces]) for name in names})


class Relevance(Protocol):
    """Compares images and videos with questions, all of a call at once."""

    def __call__(
        self, features: Sequence[MediaFeatures], questions: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the relevance [N] of each item's tokens; None: it has no question.

        questions: for each item its token ids [segments, length] on the CPU.
        """

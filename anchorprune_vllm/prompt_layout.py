# SPDX-License-Identifier: Apache-2.0
"""An item's part of the prompt: the placeholders of its embeddings, and the text among them.

vLLM finishes the unpruned prompt. Which of an item's tokens stay is decided here, from the prompt
alone, because a prompt is made before anything is selected. So where text stands among the
embeddings (tags of tiles, times of frames), each run of embeddings is a unit with a fixed share of
the budget. A separator that is always the same single token only ends the rows of an image; it is
dropped, and the item is a single unit.

For videos of some families, the text is not left in the prompt, but embedded by the worker, which
knows where it belongs (`worker/frame_text.py`). Their budget is not divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from anchorprune_vllm.budget import unit_budgets


class Piece(NamedTuple):
    """A token of the prompt, and how often it is repeated."""

    token: int
    repeats: int
    is_embedding: bool


@dataclass(frozen=True)
class PromptLayout:
    """The unpruned tokens of one image or video, as the model's own processor writes them."""

    pieces: tuple[Piece, ...]
    margin: int | None = None
    """The number of text tokens at either end of a video that belong to no frame, if the worker
    embeds the text; None if the text stays in the prompt."""

    @classmethod
    def of(cls, tokens: Sequence[int], is_embedding: Sequence[bool] | None = None) -> PromptLayout:
        """Return the layout of an item's tokens; without a mask, all of them are embeddings."""
        mask = [True] * len(tokens) if is_embedding is None else is_embedding
        repeated = groupby(zip(tokens, mask, strict=True))
        return cls(tuple(Piece(*key[:1], len([*group]), key[1]) for key, group in repeated))

    @property
    def length(self) -> int:
        """Return the number of all tokens, including those between embeddings."""
        return sum(piece.repeats for piece in self.pieces)

    @property
    def embeddings(self) -> int:
        """Return the number of embeddings."""
        return sum(self.runs)

    @property
    def runs(self) -> tuple[int, ...]:
        """Return the lengths of the runs of embeddings."""
        return tuple(count for is_embedding, count, _ in self._stretches if is_embedding)

    @cached_property
    def is_in_rows(self) -> bool:
        """Return whether the runs are rows of one image, with a single token between them."""
        gaps = [gap for is_embedding, _, gap in self._stretches[1:-1] if not is_embedding]
        return len(set(gaps)) == 1 and sum(piece.repeats for piece in gaps[0]) == 1

    @property
    def texts(self) -> list[list[int]]:
        """Return the tokens before, between and after the runs, one list more than runs."""
        texts: list[list[int]] = [[]]
        for is_embedding, _, pieces in self._stretches:
            if is_embedding:
                texts.append([])
            else:
                texts[-1] = [piece.token for piece in pieces for _ in range(piece.repeats)]
        return texts

    @property
    def unit_sizes(self) -> tuple[int, ...]:
        """Return the number of embeddings of each unit."""
        return (self.embeddings,) if self.is_in_rows else self.runs

    @property
    def placeholder(self) -> int:
        """Return the token that stands for an embedding."""
        return next(piece.token for piece in self.pieces if piece.is_embedding)

    @property
    def moves_text(self) -> bool:
        """Return whether the worker embeds the text, and may keep any tokens of any unit."""
        return self.margin is not None

    def shares(self, kept: int) -> list[int]:
        """Return how many embeddings stay of each unit if `kept` stay in total.

        There is only one number if the budget is not divided.
        """
        is_divided = len(self.unit_sizes) > 1 and not self.moves_text
        return unit_budgets(kept, self.unit_sizes) if is_divided else [kept]

    def stays(self, kept: Sequence[int]) -> list[bool]:
        """Return which tokens stay, given the number of embeddings to keep of each unit."""
        left, unit = list(kept), 0
        stays: list[bool] = []
        last = len(self._stretches) - 1
        for number, (is_embedding, count, _) in enumerate(self._stretches):
            if is_embedding:
                taken = min(count, left[unit])
                stays += [True] * taken + [False] * (count - taken)
                left[unit] -= taken
                unit += not self.is_in_rows
            else:
                stays += [not self.is_in_rows or number in (0, last)] * count
        return stays

    def tokens(self) -> list[int]:
        """Return the ids of all tokens."""
        return [piece.token for piece in self.pieces for _ in range(piece.repeats)]

    def is_embedding(self) -> list[bool]:
        """Return which tokens stand for embeddings."""
        return [piece.is_embedding for piece in self.pieces for _ in range(piece.repeats)]

    def to_tensor(self) -> Tensor:
        """Return the margin and the pieces as int64 [1 + pieces, 3] on the CPU."""
        margin = -1 if self.margin is None else self.margin
        return torch.tensor(((margin, 0, 0), *self.pieces), dtype=torch.int64, device="cpu")

    @classmethod
    def from_tensor(cls, numbers: Tensor) -> PromptLayout:
        """Return the layout that `to_tensor` wrote."""
        (margin, *_), *pieces = numbers.tolist()
        return cls(
            tuple(Piece(token, times, bool(flag)) for token, times, flag in pieces),
            None if margin < 0 else margin,
        )

    @cached_property
    def _stretches(self) -> tuple[tuple[bool, int, tuple[Piece, ...]], ...]:
        """Return alternating stretches of embeddings and text: the kind, length and pieces."""
        merged = ((key, (*group,)) for key, group in groupby(self.pieces, lambda p: p.is_embedding))
        return tuple((key, sum(piece.repeats for piece in group), group) for key, group in merged)

# SPDX-License-Identifier: Apache-2.0
"""What a patch may be about (a colour, a shape, both, a letter), and whether a picture shows it.

Patches learn what they are about from labels of whole pictures: is there anything red, is there a
red star? No label says where. That the best patch of a picture with a red star must score high,
and the best of one without must not, is what puts the score on the star.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anchorprune_vllm.commands.eval.clutter import COLOURS, LETTERS, SHAPES, SIGN
from anchorprune_vllm.commands.eval.vqa_data import Picture, Shown

_SHARPNESS = 30.0
"""Of the soft maximum over the patches of a picture, in cosines."""


@dataclass(frozen=True)
class Term:
    """A colour, a shape, or both; or a letter."""

    colour: str | None = None
    shape: str | None = None
    letter: str = ""

    def is_true_of(self, thing: Shown) -> bool:
        is_such = self.colour in (None, thing.colour) and self.shape in (None, thing.shape)
        return is_such and self.letter in thing.letters

    def words(self) -> list[str]:
        """Return the term's words."""
        return [word for word in (self.colour, self.shape, self.letter) if word]


def all_terms() -> list[Term]:
    """Return every colour, every shape, every pair of them, and every letter."""
    shapes = (*SHAPES, SIGN, "letter")
    pairs = [
        Term(colour, shape)
        for colour in (None, *COLOURS)
        for shape in (None, *shapes)
        if (colour, shape) != (None, None)
    ]
    return [*pairs, *(Term(letter=letter) for letter in LETTERS)]


@cache
def _truths(terms: tuple[Term, ...], thing: Shown) -> Tensor:
    return torch.tensor([term.is_true_of(thing) for term in terms])


def labels_of(pictures: Sequence[Picture], terms: tuple[Term, ...]) -> Tensor:
    """Return which terms [B, T] are true of anything in a picture, as 1 and 0."""
    return torch.stack(
        [torch.stack([_truths(terms, thing) for thing in each.things]).any(0) for each in pictures]
    ).float()


class GroundingLoss(nn.Module):
    """Tell which terms are true of a picture from the patch that fits each of them best."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(3.0))
        self.offset = nn.Parameter(torch.tensor(-6.0))

    def forward(self, cosines: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of cosines [B, T, N] of terms with patches, for labels [B, T]."""
        best = (cosines * _SHARPNESS).logsumexp(-1) / _SHARPNESS - math.log(4) / _SHARPNESS
        logits = self.log_scale.exp() * best + self.offset
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        # Most terms are true of nothing: without weights the few that are would hardly count.
        return 2 * (losses * (1 + 2 * labels)).mean()

# SPDX-License-Identifier: Apache-2.0
"""What a vision tower learns first: what each patch of a drawn image shows.

The heads that say it are thrown away after the training. What patches have in common with words is
not learned here, but from labels of whole images (`terms.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anchorprune_vllm.commands.eval.asked_thing import tokens_on
from anchorprune_vllm.commands.eval.clutter import COLOURS, LETTERS, SHAPES, SIGN
from anchorprune_vllm.commands.eval.vqa_data import Box, Picture
from examples.train_demo.sequences import SIDE, VISUAL_TOKENS

_GROUND = "ground"
_COLOURS = (_GROUND, *COLOURS)
_SHAPES = (_GROUND, *SHAPES, SIGN, "letter")
_NAMES = ("colour", "shape", "first letter", "second letter", "shape to the left")
_UNKNOWN = -100  # as PyTorch has it


class PlaceLoss(nn.Module):
    """Tell what a patch is part of: colour, shape, two letters, and the shape to the left of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (len(_COLOURS), len(_SHAPES), len(LETTERS), len(LETTERS), len(_SHAPES))
        self.heads = nn.ModuleList(nn.Linear(width, size) for size in sizes)

    @torch.no_grad()
    def accuracy(self, features: Tensor, pictures: Sequence[Picture]) -> dict[str, float]:
        """Return the share of patches for which each head is right, where it is known."""
        labels = torch.stack([labels_of_patches(picture) for picture in pictures])
        rows = F.layer_norm(features, features.shape[-1:])
        right = [head(rows).argmax(-1) == labels[:, n] for n, head in enumerate(self.heads)]
        return {
            name: float(each[labels[:, n] >= 0].float().mean())
            for n, (name, each) in enumerate(zip(_NAMES, right, strict=True))
        }

    def forward(self, features: Tensor, pictures: Sequence[Picture]) -> Tensor:
        """Return the loss of the features [B, N, D] of images; it is 0 where no place is known."""
        labels = torch.stack([labels_of_patches(picture) for picture in pictures])  # [B, 5, N]
        rows = F.layer_norm(features, features.shape[-1:])
        losses = [
            F.cross_entropy(head(rows).mT, wanted, reduction="sum") / max(1, (wanted >= 0).sum())
            for head, wanted in zip(self.heads, labels.unbind(1), strict=True)
        ]
        return torch.stack(losses).sum()


def labels_of_patches(picture: Picture) -> Tensor:
    """Return the labels [5, N] of an image's patches; of its letters, only where there are some."""
    labels = torch.full((5, SIDE, SIDE), _UNKNOWN)
    placed = [(thing, thing.box) for thing in picture.things if thing.box is not None]
    if placed:
        labels[:2] = 0
    for thing, box in placed:
        left, top, right, bottom = (round(SIDE * edge) for edge in box)
        patches = labels[:, top:bottom, left:right]
        patches[0] = _COLOURS.index(thing.colour)
        patches[1] = _SHAPES.index(thing.shape)
        for number, letter in enumerate(thing.letters):
            patches[2 + number] = LETTERS.index(letter)
        beside = [other for other, place in placed if _is_left_of(place, box)]
        if beside:
            patches[4] = _SHAPES.index(beside[0].shape)
    return labels.view(5, VISUAL_TOKENS)


def left_of_patches(picture: Picture) -> Tensor:
    """Return for each patch which ones show what stands to the left of its thing: bool [N, N]."""
    found = torch.zeros(VISUAL_TOKENS, VISUAL_TOKENS, dtype=torch.bool)
    boxes = [thing.box for thing in picture.things if thing.box is not None]
    for box in boxes:
        for other in boxes:
            if _is_left_of(other, box):
                grid = (SIDE, SIDE)
                found[tokens_on([box], grid)] = tokens_on([other], grid)
    return found


def _is_left_of(one: Box, other: Box) -> bool:
    """Whether the one ends where the other begins, and they are equally high."""
    return abs(one[2] - other[0]) < 1e-6 and one[1] == other[1]

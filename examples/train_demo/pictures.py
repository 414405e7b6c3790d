# SPDX-License-Identifier: Apache-2.0
"""What the demo models learn from: pictures of three sets, as pixels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from anchorprune_vllm.commands.eval.clutter import cluttered_scene
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE, scene
from anchorprune_vllm.commands.eval.vqa_data import Picture, easy_vqa

IMAGE_SIZE = 224
SHARES = {"clutter": 0.7, "scenes": 0.2, "easy-vqa": 0.1}
"""Of a batch, on average."""
SCENES = {"clutter": 10_000, "scenes": 4_000}
"""Different ones in the training. They are drawn once and kept: drawing takes as long as a step."""
VALIDATION = 100
"""Pictures of each set, held out of the training, by which its progress is judged."""

_MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
_DEVIATION = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
_COUNTS = (8, 14, 30, 30)
"""Of the things in cluttered scenes: what is learned from fewer helps with thirty."""


def batch_of(rng: random.Random, size: int) -> list[Picture]:
    """Choose pictures to learn from."""
    names = rng.choices(list(SHARES), list(SHARES.values()), k=size)
    return [_training_picture(name, rng) for name in names]


def _training_picture(name: str, rng: random.Random) -> Picture:
    if name == "easy-vqa":
        return rng.choice(_easy_vqa()[VALIDATION:])
    return _drawn(name, rng.randrange(SCENES[name]))


@cache
def _drawn(name: str, seed: int) -> Picture:
    if name == "scenes":
        return scene(seed)
    return cluttered_scene(seed, each=4, count=_COUNTS[seed % len(_COUNTS)])


@cache
def _easy_vqa() -> list[Picture]:
    """Return the pictures of which colour and shape are known."""
    return [picture for picture in easy_vqa("train") if picture.things]


def validation() -> dict[str, list[Picture]]:
    """Return pictures of each set that are neither trained on nor tested."""
    drawn = {
        name: [draw(FIRST_TEST_SCENE - 1 - number) for number in range(VALIDATION)]
        for name, draw in (("clutter", cluttered_scene), ("scenes", scene))
    }
    return {**drawn, "easy-vqa": _easy_vqa()[:VALIDATION]}


def pixels_of(pictures: Sequence[Picture]) -> Tensor:
    """Return pixels [B, 3, 224, 224] as the models' processors prepare them."""
    return (torch.stack([_bytes_of(each) for each in pictures]) / 255 - _MEAN) / _DEVIATION


_KEPT: dict[int, tuple[Picture, Tensor]] = {}


def _bytes_of(picture: Picture) -> Tensor:
    """Return a picture as bytes [3, 224, 224], drawn or read the first time only."""
    if id(picture) not in _KEPT:
        image = picture.load().resize((IMAGE_SIZE, IMAGE_SIZE), 3)
        _KEPT[id(picture)] = picture, torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return _KEPT[id(picture)][1]

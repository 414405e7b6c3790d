# SPDX-License-Identifier: Apache-2.0
"""The data sets of an evaluation, by name."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from anchorprune_vllm.commands.eval.clutter import cluttered_scene
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE, TEST_SCENES, scene
from anchorprune_vllm.commands.eval.vqa_data import (
    Picture,
    Question,
    blind_answers,
    easy_vqa,
    jsonl,
)

_DRAWN: dict[str, Callable[[int], Picture]] = {"scenes": scene, "clutter": cluttered_scene}
_BUILT_IN = ("easy-vqa", *_DRAWN)
_TRAINING_SCENES = 4000  # enough for a stable guess at each of their questions


@dataclass(frozen=True)
class DataSet:
    """Images with questions, under a name."""

    name: str
    pictures: tuple[Picture, ...]

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """All questions, image by image."""
        return tuple(question for picture in self.pictures for question in picture.questions)

    @cached_property
    def picture_of(self) -> list[int]:
        """The number of each question's image."""
        return [n for n, picture in enumerate(self.pictures) for _ in picture.questions]

    @cached_property
    def kind_of(self) -> list[str]:
        """The kind of each question."""
        return [question.kind for question in self.questions]

    @property
    def knows_places(self) -> bool:
        """Whether questions say where the things are that they are about."""
        return any(question.about for question in self.questions)

    def fingerprint(self) -> str:
        """Return a hash of the questions and their answers, but not of the pixels."""
        asked = [
            [number, question.text, question.answers, question.kind]
            for number, question in zip(self.picture_of, self.questions, strict=True)
        ]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def load_data(names: Sequence[str], limit: int | None) -> list[DataSet]:
    """Return the test images of each data set, with at most `limit` questions in each."""
    found = [_load(name, limit) for name in names]
    for title, count in Counter(data.name for data in found).items():
        if count > 1:
            raise ValueError(f"two data sets are called {title!r}: give each once, or rename one")
    return found


def blind_guesses(name: str) -> dict[str, str] | None:
    """Return the training split's most frequent answers; None if there is no such split."""
    if name == "easy-vqa":
        return blind_answers(easy_vqa("train"))
    if name in _DRAWN:
        return blind_answers(map(_DRAWN[name], range(_TRAINING_SCENES)))
    return None


def first_questions(pictures: Sequence[Picture], limit: int | None) -> tuple[Picture, ...]:
    """Return whole images in order, at least one, with no more questions than `limit` in all."""
    count = 0
    for number, picture in enumerate(pictures):
        count += len(picture.questions)
        if number and limit is not None and count > limit:
            return tuple(pictures[:number])
    return tuple(pictures)


def _load(name: str, limit: int | None) -> DataSet:
    title = name
    if name == "easy-vqa":
        pictures = easy_vqa("test")
    elif name in _DRAWN:
        numbers = range(FIRST_TEST_SCENE, FIRST_TEST_SCENE + TEST_SCENES)
        pictures = [*map(_DRAWN[name], numbers)]
    elif Path(name).is_file():
        pictures = jsonl(Path(name))
        title = Path(name).stem
        if title in _BUILT_IN:
            raise ValueError(f"{name} has the name of another data set: rename it")
    else:
        raise ValueError(
            f"there is no file {name!r}, nor such a set: give {', '.join(_BUILT_IN)}, "
            "or a file of questions (.jsonl)"
        )
    return DataSet(title, first_questions(pictures, limit))

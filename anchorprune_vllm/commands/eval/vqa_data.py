# SPDX-License-Identifier: Apache-2.0
"""Pictures with questions and answers: easy-vqa, scenes of our own, or a file of the user's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from anchorprune_vllm.commands.eval.json_lines import read_json_lines

COLOURS = ("red", "green", "blue", "yellow", "black", "gray", "teal", "brown")
SHAPES = ("circle", "rectangle", "triangle")

_UNREADABLE = (OSError, Image.DecompressionBombError)
"""What Pillow raises for files that are no pictures, and for pictures of too many pixels."""
_EXAMPLE = '{"image": "a.png", "question": "...", "answers": ["..."]}'


Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as shares of a picture's width and height."""


@dataclass(frozen=True)
class Question:
    """One question about a picture. The first answer is the one to learn, any is right."""

    text: str
    answers: tuple[str, ...]
    kind: str
    """What sort of answer it wants: scores are given for each."""
    about: tuple[Box, ...] = ()
    """Where the things are that it takes to answer, the named one first; (): not known."""


class Shown(NamedTuple):
    """A thing in a picture."""

    colour: str
    shape: str
    letters: str = ""
    """Those written on it, or the one that it is."""
    box: Box | None = None
    """Where it is; None: not known."""


@dataclass(frozen=True)
class Picture:
    """A picture, drawn or read when it is asked for, and what is asked about it."""

    load: Callable[[], Image.Image]
    questions: tuple[Question, ...]
    caption: str | None = None
    things: tuple[Shown, ...] = ()
    """Each thing in it, as far as they are known; only training reads them."""


def easy_vqa(split: str) -> list[Picture]:
    """The pictures of easy-vqa's `train` or `test` split, in order.

    easy-vqa is Victor Zhou's, on PyPI: 5,000 pictures of one shape each, 48,248 questions.
    """
    try:
        package = import_module("easy_vqa")
    except ImportError as error:
        raise RuntimeError(
            "easy-vqa is not installed; run: pip install 'anchorprune-vllm[eval]'"
        ) from error
    texts, answers, numbers = getattr(package, f"get_{split}_questions")()
    paths = getattr(package, f"get_{split}_image_paths")()
    asked: dict[int, list[Question]] = defaultdict(list)
    for text, answer, number in zip(texts, answers, numbers, strict=True):
        asked[number].append(Question(text, (answer,), kind_of(answer)))
    found = []
    for number, questions in sorted(asked.items()):
        things = _thing(questions)
        caption = f"a {things[0].colour} {things[0].shape}" if things else None
        found.append(
            Picture(partial(_read, Path(paths[number])), tuple(questions), caption, things)
        )
    return found


def jsonl(path: Path) -> list[Picture]:
    """One question a line: {"image": PATH, "question": ..., "answers": [...], "kind": ...}.

    Paths are relative to the file; "kind" may be left out. Questions about one picture need not
    follow each other.
    """
    asked: dict[Path, list[Question]] = defaultdict(list)
    for line in read_json_lines(path, _EXAMPLE):
        try:
            name, question = _parse(line.row)
            image = path.parent / name
            if image not in asked:
                _check_picture(image)
        except ValueError as error:
            raise ValueError(f"{path}, line {line.number}: {error}") from error
        asked[image].append(question)
    return [Picture(partial(_read, image), tuple(found)) for image, found in asked.items()]


def blind_answers(pictures: Iterable[Picture]) -> dict[str, str]:
    """The most frequent answer to each question: all that can be known without the picture."""
    seen: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for picture in pictures:
        for question in picture.questions:
            seen[question.text][question.answers[0]] += 1
    return {text: max(sorted(counts), key=counts.__getitem__) for text, counts in seen.items()}


def kind_of(answer: str) -> str:
    """yes/no, shape or colour."""
    if answer in ("yes", "no"):
        return "yes/no"
    return "shape" if answer in SHAPES else "colour"


def _thing(questions: Sequence[Question]) -> tuple[Shown, ...]:
    """Return the one thing of an easy-vqa picture, if its questions tell colour and shape."""
    known: dict[str, str] = {}
    for question in questions:
        (answer,) = question.answers
        words = question.text.rstrip("?").split()
        if question.kind != "yes/no":
            known[question.kind] = answer
        # "what color is the circle?", "is there not a red shape?": it is there if that is so.
        is_there = question.kind != "yes/no" or (answer == "yes") != bool({"no", "not"} & {*words})
        if is_there:
            for kind, names in (("colour", COLOURS), ("shape", SHAPES)):
                for word in words:
                    if word in names:
                        known[kind] = word
    if known.keys() != {"colour", "shape"}:
        return ()
    return (Shown(known["colour"], known["shape"]),)


def _parse(row: Mapping[str, Any]) -> tuple[str, Question]:
    """The picture's name and the question of one line of a file."""
    for key in ("image", "question", "answers"):
        if key not in row:
            raise ValueError(f"there is no {key!r} in it; give lines such as {_EXAMPLE}")
    name, text, answers, kind = row["image"], row["question"], row["answers"], row.get("kind")
    for key, value in (("image", name), ("question", text), ("kind", kind)):
        if not isinstance(value, str) and (key != "kind" or value is not None):
            raise ValueError(f"{key} is {value!r:.80}: give a text")
    # Of a string, each letter would be an answer.
    if not isinstance(answers, list) or not answers:
        raise ValueError(f'answers is {answers!r:.80}: give a list of at least one, as ["yes"]')
    for answer in answers:
        # Python's words for the others, such as None and True, are nobody's answers.
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise ValueError(f"answers has {answer!r:.80} in it: give texts or numbers")
    return name, Question(text, tuple(map(str, answers)), kind or "all")


def _check_picture(path: Path) -> None:
    """Raise ValueError if there is no picture; of one that there is, only the size is read."""
    if not path.is_file():
        raise ValueError(f"there is no picture {path}")
    try:
        Image.open(path).close()
    except _UNREADABLE as error:
        raise ValueError(f"cannot read the picture {path}: {error}") from error


def _read(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except _UNREADABLE as error:
        raise ValueError(f"cannot read the picture {path}: {error}") from error

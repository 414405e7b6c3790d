# SPDX-License-Identifier: Apache-2.0
"""Images with questions and answers: the types, easy-vqa, and files of the user's own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, NamedTuple

from PIL import Image
from pydantic import BaseModel, Field, ValidationError

from anchorprune_vllm.commands.checks import refusal
from anchorprune_vllm.commands.eval.json_lines import read_json_lines

SIMPLE_COLOURS = ("red", "green", "blue", "yellow", "black", "gray", "teal", "brown")
SIMPLE_SHAPES = ("circle", "rectangle", "triangle")
"""The colours and shapes of easy-vqa and of `scenes`."""
_NAMES = dict.fromkeys(SIMPLE_COLOURS, "colour") | dict.fromkeys(SIMPLE_SHAPES, "shape")

_UNREADABLE = (OSError, Image.DecompressionBombError)
"""What Pillow raises for files that are no images, and for images of too many pixels."""
_EXAMPLE = '{"image": "a.png", "question": "...", "answers": ["..."]}'

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as shares of an image's width and height."""


@dataclass(frozen=True)
class Question:
    """A question about an image. Any of its answers is right; models are trained on the first."""

    text: str
    answers: tuple[str, ...]
    kind: str
    """What sort of answer it asks for; each kind has an accuracy of its own."""
    about: tuple[Box, ...] = ()
    """Where the things are that the answer depends on, the named one first; empty if unknown."""


class Shown(NamedTuple):
    """A thing in an image."""

    colour: str
    shape: str
    letters: str = ""
    """The letters on it, or the letter that it is."""
    box: Box | None = None
    """Where it is, if that is known."""


@dataclass(frozen=True)
class Picture:
    """An image with its questions; its pixels are drawn or read on demand."""

    load: Callable[[], Image.Image]
    questions: tuple[Question, ...]
    caption: str | None = None
    things: tuple[Shown, ...] = ()
    """The things in it, as far as they are known; only training uses them."""


def blind_answers(pictures: Iterable[Picture]) -> dict[str, str]:
    """Return the most frequent answer to each question: the best guess without the image."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for picture in pictures:
        for question in picture.questions:
            seen[question.text][question.answers[0]] += 1
    return {text: max(sorted(counts), key=counts.__getitem__) for text, counts in seen.items()}


# -- easy-vqa -------------------------------------------------------------------------------------


def easy_vqa(split: str) -> list[Picture]:
    """Return the images of easy-vqa's `train` or `test` split, in order.

    easy-vqa is a package by Victor Zhou: 5,000 images of one shape each, and 48,248 questions.
    """
    try:
        package = import_module("easy_vqa")
    except ImportError as error:
        raise RuntimeError("easy-vqa is not installed; run: pip install '.[eval]'") from error
    paths = getattr(package, f"get_{split}_image_paths")()
    asked: dict[int, list[Question]] = defaultdict(list)
    for text, answer, number in zip(*getattr(package, f"get_{split}_questions")(), strict=True):
        asked[number].append(Question(text, (answer,), kind_of(answer)))
    found = []
    for number, questions in sorted(asked.items()):
        things = _things(questions)
        caption = f"a {things[0].colour} {things[0].shape}" if things else None
        load = partial(_read, Path(paths[number]))
        found.append(Picture(load, tuple(questions), caption, things))
    return found


def kind_of(answer: str) -> str:
    """Return the kind of an easy-vqa question: yes/no, shape or colour."""
    return _NAMES.get(answer, "yes/no")


def _things(questions: Sequence[Question]) -> tuple[Shown, ...]:
    """Return the one thing of an easy-vqa image, if its questions tell colour and shape."""
    known: dict[str, str] = {}
    for question in questions:
        (answer,) = question.answers
        words = question.text.rstrip("?").split()
        if question.kind != "yes/no":
            known[question.kind] = answer
        # "what color is the circle?" has a circle, and so has "is there not a circle?", "no".
        if question.kind != "yes/no" or (answer == "yes") != bool({"no", "not"} & {*words}):
            known |= {_NAMES[word]: word for word in words if word in _NAMES}
    if known.keys() != {"colour", "shape"}:
        return ()
    return (Shown(known["colour"], known["shape"]),)


# -- files of the user's own ----------------------------------------------------------------------


class _Line(BaseModel):
    image: str
    question: str
    answers: list[Annotated[str, Field(coerce_numbers_to_str=True)]] = Field(min_length=1)
    kind: str | None = None


def jsonl(path: Path) -> list[Picture]:
    """Read a file with lines {"image": PATH, "question": ..., "answers": [...], "kind": ...}.

    Paths are relative to the file, `kind` may be left out, and questions about one image need not
    follow one another. Raises ValueError for a line that is wrong.
    """
    asked: dict[Path, list[Question]] = defaultdict(list)
    for number, _, row in read_json_lines(path, _EXAMPLE):
        where = f"{path}, line {number}"
        try:
            line = _Line.model_validate(row)
            image = path.parent / line.image
            if image not in asked:
                _check_image(image)
        except ValidationError as error:
            raise ValueError(f"{where}: {refusal(error)}; give lines such as {_EXAMPLE}") from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        asked[image].append(Question(line.question, tuple(line.answers), line.kind or "all"))
    return [Picture(partial(_read, image), tuple(found)) for image, found in asked.items()]


def _check_image(path: Path) -> None:
    """Raise ValueError if a file is no image; only its header is read."""
    if not path.is_file():
        raise ValueError(f"there is no image {path}: paths are relative to the file of questions")
    try:
        Image.open(path).close()
    except _UNREADABLE as error:
        raise ValueError(f"cannot read the image {path}: {error}") from error


def _read(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except _UNREADABLE as error:
        raise ValueError(f"cannot read the image {path}: {error}") from error

# SPDX-License-Identifier: Apache-2.0
"""Scenes of several coloured things, and questions that need one of them."""

from __future__ import annotations

import random
from functools import partial

from PIL import Image, ImageDraw, ImageFont

from anchorprune_vllm.commands.eval.vqa_data import COLOURS, SHAPES, Box, Picture, Question, Shown

_SIZE = 168
_CELLS = 3
_RGB = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "yellow": (235, 205, 30),
    "black": (20, 20, 20),
    "gray": (140, 140, 140),
    "teal": (0, 140, 140),
    "brown": (130, 80, 35),
}

LETTERS = ("A", "B", "C", "E", "H", "T")

_Pixels = tuple[int, int, int, int]
"""Left, top, right and bottom."""

FIRST_TEST_SCENE = 10_000_000
"""Seeds from here on are for tests: no scene is both trained on and tested."""
TEST_SCENES = 1000


def scene(seed: int) -> Picture:
    """Two to four things, no shape and no colour twice, each in a cell of its own.

    One of them may be a letter.
    """
    rng = random.Random(seed)
    count = rng.randint(2, 4)
    shapes = rng.sample((*SHAPES, "letter"), count)
    colours = rng.sample(COLOURS, count)
    cells = rng.sample(range(_CELLS**2), count)
    letter = rng.choice(LETTERS)
    boxes = [_box(rng, shape, cell) for shape, cell in zip(shapes, cells, strict=True)]
    things = list(zip(colours, shapes, boxes, strict=True))
    drawn = {
        shape: Shown(colour, shape, letter if shape == "letter" else "", _share(box))
        for colour, shape, box in things
    }
    return Picture(
        partial(_draw, things, letter, rng.randrange(2**32)),
        tuple(_questions(rng, drawn)),
        " and ".join(
            f"a {each.colour} {each.shape}{f' {each.letters}' if each.letters else ''}"
            for each in drawn.values()
        ),
        tuple(drawn.values()),
    )


def _share(box: _Pixels) -> Box:
    left, top, right, bottom = box
    return left / _SIZE, top / _SIZE, right / _SIZE, bottom / _SIZE


def _questions(rng: random.Random, drawn: dict[str, Shown]) -> list[Question]:
    found = []
    colours = {thing.colour for thing in drawn.values()}

    def ask(text: str, answer: str, kind: str, *about: Shown) -> None:
        boxes = tuple(thing.box for thing in about if thing.box is not None)
        found.append(Question(text, (answer,), kind, boxes))

    for shape, thing in drawn.items():
        colour = thing.colour
        if thing.letters:
            ask("what is the letter?", thing.letters, "letter", thing)
        ask(f"what color is the {shape}?", colour, "colour", thing)
        ask(f"what is the {colour} shape?", shape, "shape", thing)
        # Half of these are not there: another's colour, or a colour that nothing has.
        other = rng.choice([each for each in COLOURS if each != colour])
        mixed = rng.choice(sorted(colours - {colour}))
        for _ in range(2):
            ask(f"is there a {colour} {shape}?", "yes", "yes/no", thing)
        ask(f"is there a {other} {shape}?", "no", "yes/no")
        ask(f"is there a {mixed} {shape}?", "no", "yes/no")
    rng.shuffle(found)
    return found


def _box(rng: random.Random, shape: str, cell: int) -> _Pixels:
    """Choose where in a cell a thing is drawn, and how large."""
    row, column = divmod(cell, _CELLS)
    side = _SIZE // _CELLS
    width, height = rng.randint(26, side - 6), rng.randint(26, side - 6)
    if shape == "circle":
        height = width
    left = column * side + rng.randint(2, side - 2 - width)
    top = row * side + rng.randint(2, side - 2 - height)
    return left, top, left + width, top + height


def _draw(things: list[tuple[str, str, _Pixels]], letter: str, seed: int) -> Image.Image:
    rng = random.Random(seed)
    ground = rng.randint(225, 255)
    picture = Image.new("RGB", (_SIZE, _SIZE), (ground, ground, ground))
    draw = ImageDraw.Draw(picture)
    for colour, shape, box in things:
        left, top, right, bottom = box
        rgb = tuple(max(0, min(255, value + rng.randint(-15, 15))) for value in _RGB[colour])
        if shape == "circle":
            draw.ellipse(box, fill=rgb)
        elif shape == "rectangle":
            draw.rectangle(box, fill=rgb)
        elif shape == "letter":
            font = ImageFont.load_default(size=bottom - top + 8)
            middle = ((left + right) / 2, (top + bottom) / 2)
            draw.text(middle, letter, fill=rgb, font=font, anchor="mm", stroke_width=1)
        else:
            corners = [(left, bottom), (right, bottom)]
            draw.polygon([*corners, (rng.randint(left, right), top)], fill=rgb)
    return picture

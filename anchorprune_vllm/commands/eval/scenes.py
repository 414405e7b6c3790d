# SPDX-License-Identifier: Apache-2.0
"""Simple scenes: two to four coloured things on plain ground, and questions about one of them."""

from __future__ import annotations

import random
from functools import partial

from PIL import Image, ImageDraw, ImageFont

from anchorprune_vllm.commands.eval.vqa_data import (
    SIMPLE_COLOURS,
    SIMPLE_SHAPES,
    Box,
    Picture,
    Question,
    Shown,
)

FIRST_TEST_SCENE = 10_000_000
"""Seeds from here on are for tests: no scene is both trained on and tested."""
TEST_SCENES = 1000
LETTERS = "ABCEHT"

_SIZE = 168
_CELLS = 3
_CELL = _SIZE // _CELLS
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
_Pixels = tuple[int, int, int, int]
"""Left, top, right and bottom."""


def scene(seed: int) -> Picture:
    """Return the scene of a seed: two to four things, one of which may be a letter.

    No two of them have the same shape or colour, and each is in a cell of its own.
    """
    rng = random.Random(seed)
    count = rng.randint(2, 4)
    shapes = rng.sample((*SIMPLE_SHAPES, "letter"), count)
    colours = rng.sample(SIMPLE_COLOURS, count)
    cells = rng.sample(range(_CELLS**2), count)
    letter = rng.choice(LETTERS)
    boxes = [_pixels(rng, shape, cell) for shape, cell in zip(shapes, cells, strict=True)]
    drawn = list(zip(colours, shapes, boxes, strict=True))
    things = tuple(
        Shown(colour, shape, letter if shape == "letter" else "", _box(pixels))
        for colour, shape, pixels in drawn
    )
    load = partial(_draw, drawn, letter, rng.randrange(2**32))
    named = (f"a {thing.colour} {thing.shape} {thing.letters}".rstrip() for thing in things)
    return Picture(load, tuple(_questions(rng, things)), " and ".join(named), things)


def _pixels(rng: random.Random, shape: str, cell: int) -> _Pixels:
    """Choose how large a thing is, and where in its cell."""
    row, column = divmod(cell, _CELLS)
    width, height = rng.randint(26, _CELL - 6), rng.randint(26, _CELL - 6)
    if shape == "circle":
        height = width
    left = column * _CELL + rng.randint(2, _CELL - 2 - width)
    top = row * _CELL + rng.randint(2, _CELL - 2 - height)
    return left, top, left + width, top + height


def _box(pixels: _Pixels) -> Box:
    left, top, right, bottom = pixels
    return left / _SIZE, top / _SIZE, right / _SIZE, bottom / _SIZE


def _questions(rng: random.Random, things: tuple[Shown, ...]) -> list[Question]:
    found = []
    colours = {thing.colour for thing in things}
    for thing in things:
        colour, shape = thing.colour, thing.shape
        about = () if thing.box is None else (thing.box,)
        if thing.letters:
            found.append(Question("what is the letter?", (thing.letters,), "letter", about))
        found.append(Question(f"what color is the {shape}?", (colour,), "colour", about))
        found.append(Question(f"what is the {colour} shape?", (shape,), "shape", about))
        # As many noes as yeses: about a colour of another thing, and about any other colour.
        other = rng.choice([each for each in SIMPLE_COLOURS if each != colour])
        mixed = rng.choice(sorted(colours - {colour}))
        found += [Question(f"is there a {colour} {shape}?", ("yes",), "yes/no", about)] * 2
        for absent in (other, mixed):
            found.append(Question(f"is there a {absent} {shape}?", ("no",), "yes/no"))
    rng.shuffle(found)
    return found


def _draw(things: list[tuple[str, str, _Pixels]], letter: str, seed: int) -> Image.Image:
    rng = random.Random(seed)
    ground = rng.randint(225, 255)
    image = Image.new("RGB", (_SIZE, _SIZE), (ground, ground, ground))
    draw = ImageDraw.Draw(image)
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
    return image

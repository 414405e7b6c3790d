# SPDX-License-Identifier: Apache-2.0
"""Scenes of several coloured things, and questions that need one of them."""

from __future__ import annotations

import random
from functools import partial

from PIL import Image, ImageDraw, ImageFont

from anchorprune_vllm.tools.vqa_data import COLOURS, SHAPES, Picture, Question, Shown

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
    things = list(zip(colours, shapes, cells, strict=True))
    return Picture(
        partial(_draw, things, letter, rng.randrange(2**32)),
        tuple(_questions(rng, dict(zip(shapes, colours, strict=True)), letter)),
        " and ".join(
            f"a {colour} {shape}{f' {letter}' if shape == 'letter' else ''}"
            for colour, shape, _ in things
        ),
        tuple(
            Shown(colour, shape, letter if shape == "letter" else "") for colour, shape, _ in things
        ),
    )


def _questions(rng: random.Random, colour_of: dict[str, str], letter: str) -> list[Question]:
    found = []
    if "letter" in colour_of:
        found.append(Question("what is the letter?", (letter,), "letter"))
    for shape, colour in colour_of.items():
        found.append(Question(f"what color is the {shape}?", (colour,), "colour"))
        found.append(Question(f"what is the {colour} shape?", (shape,), "shape"))
        # Half of these are not there: another's colour, or a colour that nothing has.
        other = rng.choice([c for c in COLOURS if c != colour])
        mixed = rng.choice([c for c in colour_of.values() if c != colour])
        for asked in (colour, colour, other, mixed):
            answer = "yes" if asked == colour else "no"
            found.append(Question(f"is there a {asked} {shape}?", (answer,), "yes/no"))
    rng.shuffle(found)
    return found


def _draw(things: list[tuple[str, str, int]], letter: str, seed: int) -> Image.Image:
    rng = random.Random(seed)
    ground = rng.randint(225, 255)
    picture = Image.new("RGB", (_SIZE, _SIZE), (ground, ground, ground))
    draw = ImageDraw.Draw(picture)
    cell = _SIZE // _CELLS
    for colour, shape, place in things:
        row, column = divmod(place, _CELLS)
        width, height = rng.randint(26, cell - 6), rng.randint(26, cell - 6)
        if shape == "circle":
            height = width
        left = column * cell + rng.randint(2, cell - 2 - width)
        top = row * cell + rng.randint(2, cell - 2 - height)
        box = (left, top, left + width, top + height)
        rgb = tuple(max(0, min(255, value + rng.randint(-15, 15))) for value in _RGB[colour])
        if shape == "circle":
            draw.ellipse(box, fill=rgb)
        elif shape == "rectangle":
            draw.rectangle(box, fill=rgb)
        elif shape == "letter":
            font = ImageFont.load_default(size=height + 8)
            middle = (left + width / 2, top + height / 2)
            draw.text(middle, letter, fill=rgb, font=font, anchor="mm", stroke_width=1)
        else:
            corners = [(left, top + height), (left + width, top + height)]
            draw.polygon([*corners, (left + rng.randint(0, width), top)], fill=rgb)
    return picture

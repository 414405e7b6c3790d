# SPDX-License-Identifier: Apache-2.0
"""Cluttered scenes: thirty different things on textured ground, and questions about one of them.

A few visual tokens cannot show all of a scene, so a method must know which to keep. Every thing has
near copies beside it: others of its colour, and others of its shape.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from PIL import Image, ImageDraw, ImageFont

from anchorprune_vllm.commands.eval.scenes import LETTERS as LETTERS
from anchorprune_vllm.commands.eval.vqa_data import Box, Picture, Question, Shown

SIZE = 448
"""Pixels of a side. LLaVA sees half of them; either way a scene is 16 x 16 visual tokens."""
THINGS = 30
_CELLS = 8
"""Cells in a row or column; each is two by two visual tokens."""
_CELL = SIZE / _CELLS
_SIGNS = 4

COLOURS = {
    "red": (215, 35, 35),
    "green": (35, 150, 50),
    "blue": (40, 75, 215),
    "yellow": (240, 210, 40),
    "black": (20, 20, 20),
    "gray": (125, 125, 125),
    "teal": (0, 145, 150),
    "brown": (120, 70, 30),
    "orange": (245, 130, 20),
    "purple": (130, 45, 160),
    "pink": (245, 130, 180),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "rectangle", "triangle", "star", "cross", "ring", "diamond", "heart", "moon")
SIGN = "sign"


@dataclass(frozen=True)
class Thing:
    """A thing in a scene, in a cell of its own."""

    colour: str
    shape: str
    row: int
    column: int
    letters: str = ""

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def box(self) -> Box:
        """The cell: left, top, right and bottom as shares of the image."""
        left, top = self.column / _CELLS, self.row / _CELLS
        return left, top, left + 1 / _CELLS, top + 1 / _CELLS


def cluttered_scene(seed: int, each: int = 2, count: int = THINGS) -> Picture:
    """Return the scene of a seed.

    Args:
        each: the most questions of one kind; about colours and shapes there are at most two.
        count: the number of things, at least 8.
    """
    rng = random.Random(f"clutter {seed}")
    things = _things(rng, count)
    return Picture(
        partial(_draw, things, rng.randrange(2**32)),
        tuple(_questions(rng, things, each)),
        " and ".join(map(_article, rng.sample(things, 4))),
        tuple(Shown(thing.colour, thing.shape, thing.letters, thing.box) for thing in things),
    )


def _things(rng: random.Random, count: int) -> list[Thing]:
    """Choose things of which no two are alike.

    Two shapes and two colours are rare: exactly one thing has each of them, and a question can name
    it by that alone. Signs have the other colours. Some shapes and colours do not occur at all.
    """
    rare_shapes, shapes = _rare_and_common(rng, SHAPES, 2, 5)
    rare_colours, colours = _rare_and_common(rng, COLOURS, 2, 7)
    kinds = [(rng.choice(colours), shape) for shape in rare_shapes]
    kinds += [(colour, rng.choice(shapes)) for colour in rare_colours]
    signs = [(colour, SIGN) for colour in rng.sample(colours, _SIGNS)]
    others = [(colour, shape) for colour in colours for shape in shapes]
    kinds += signs + rng.sample(others, count - len(kinds) - len(signs))
    cells = rng.sample(range(_CELLS**2), count)
    things = []
    for (colour, shape), cell in zip(kinds, cells, strict=True):
        letters = "".join(rng.sample(LETTERS, 2)) if shape == SIGN else ""
        things.append(Thing(colour, shape, *divmod(cell, _CELLS), letters))
    return things


def _rare_and_common(
    rng: random.Random, names: Iterable[str], rare: int, common: int
) -> tuple[list[str], list[str]]:
    drawn = rng.sample(list(names), rare + common)
    return drawn[:rare], drawn[rare:]


def _questions(rng: random.Random, things: list[Thing], each: int) -> list[Question]:
    found = []
    shapes = [thing.shape for thing in things]
    colours = [thing.colour for thing in things]
    plain = [thing for thing in things if thing.shape != SIGN]
    plain_at = {(thing.row, thing.column): thing for thing in plain}

    def ask(text: str, answer: str, kind: str, *about: Thing) -> None:
        found.append(Question(text, (answer,), kind, tuple(thing.box for thing in about)))

    for thing in [one for one in plain if shapes.count(one.shape) == 1][:each]:
        ask(f"what color is the {thing.shape}?", thing.colour, "colour", thing)
    for thing in [one for one in plain if colours.count(one.colour) == 1][:each]:
        ask(f"what is the {thing.colour} shape?", thing.shape, "shape", thing)
    signs = [thing for thing in things if thing.shape == SIGN]
    for thing in rng.sample(signs, min(each, _SIGNS)):
        ask(f"what does the {thing.colour} sign say?", " ".join(thing.letters), "text", thing)
    pairs = [(thing, plain_at.get((thing.row, thing.column - 1))) for thing in plain]
    beside = [(thing, left) for thing, left in pairs if left]
    for thing, left in rng.sample(beside, min(each, len(beside))):
        ask(f"what is left of the {thing}?", left.shape, "relation", thing, left)
    # A thing that is not there has the colour of one that is, and the shape of another.
    there = {str(thing) for thing in things}
    mixed = {f"{one.colour} {other.shape}" for one in plain for other in plain}
    for thing in rng.sample(plain, min(each // 2, len(plain))):
        ask(f"is there {_article(thing)}?", "yes", "yes/no", thing)
    absent = sorted(mixed - there)
    for name in rng.sample(absent, min(each // 2, len(absent))):
        ask(f"is there {_article(name)}?", "no", "yes/no")
    return found


def _article(thing: Thing | str) -> str:
    return f"{'an' if str(thing).startswith('orange') else 'a'} {thing}"


# -- drawing --------------------------------------------------------------------------------------


def _draw(things: list[Thing], seed: int) -> Image.Image:
    rng = random.Random(seed)
    image = _ground(rng)
    draw = ImageDraw.Draw(image)
    for thing in things:
        side = rng.uniform(44, 52)
        x, y = (
            (place + 0.5) * _CELL + rng.uniform(-1, 1) * (_CELL - side) / 2
            for place in (thing.column, thing.row)
        )
        rgb = COLOURS[thing.colour]
        colour = tuple(max(0, min(255, value + rng.randint(-14, 14))) for value in rgb)
        if thing.shape == SIGN:
            _draw_sign(draw, x, y, colour, thing.letters)
        else:
            _draw_shape(draw, thing.shape, x, y, side / 2, colour, rng)
    return image


def _ground(rng: random.Random) -> Image.Image:
    """Paint stripes, checks or speckles in soft colours, different in each quarter."""
    image = Image.new("RGB", (SIZE, SIZE))
    half = SIZE // 2
    for corner in ((0, 0), (half, 0), (0, half), (half, half)):
        tile = Image.new("RGB", (half, half), _soft(rng))
        draw, other, step = ImageDraw.Draw(tile), _soft(rng), rng.randint(9, 22)
        kind = rng.choice(("stripes", "slanted", "checks", "speckles"))
        if kind == "stripes":
            for start in range(0, half, 2 * step):
                draw.rectangle((0, start, half, start + step - 1), fill=other)
        elif kind == "slanted":
            for start in range(-half, half, 2 * step):
                draw.line((start, half, start + half, 0), fill=other, width=step // 2)
        elif kind == "checks":
            for row in range(0, half, step):
                for column in range(row // step % 2 * step, half, 2 * step):
                    draw.rectangle((column, row, column + step - 1, row + step - 1), fill=other)
        else:
            for _ in range(half * half // (step * step)):
                x, y, r = rng.uniform(0, half), rng.uniform(0, half), rng.uniform(1, step / 3)
                draw.ellipse((x - r, y - r, x + r, y + r), fill=other)
        image.paste(tile, corner)
    return image


def _soft(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(165, 225) for _ in range(3))


def _draw_sign(
    draw: ImageDraw.ImageDraw, x: float, y: float, colour: tuple[int, ...], letters: str
) -> None:
    draw.rectangle((x - 27, y - 21, x + 27, y + 21), fill=colour, outline=_EDGE, width=2)
    ink = (0, 0, 0) if sum(colour) > 330 else (255, 255, 255)
    font = ImageFont.load_default(size=34)
    for letter, place in zip(letters, (x - 13, x + 13), strict=True):
        draw.text((place, y), letter, fill=ink, font=font, anchor="mm", stroke_width=1)


def _draw_shape(
    draw: ImageDraw.ImageDraw,
    shape: str,
    x: float,
    y: float,
    r: float,
    colour: tuple[int, ...],
    rng: random.Random,
) -> None:
    """Draw a shape of a radius around a point, with a thin dark edge as on a sticker."""
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        draw.ellipse(box, fill=colour, outline=_EDGE, width=2)
    elif shape == "ring":
        draw.ellipse(box, outline=_EDGE, width=int(0.5 * r))
        inside = (x - r + 2, y - r + 2, x + r - 2, y + r - 2)
        draw.ellipse(inside, outline=colour, width=int(r / 2.4))
    elif shape == "rectangle":
        h = r * rng.uniform(0.55, 0.8)
        draw.rectangle((x - r, y - h, x + r, y + h), fill=colour, outline=_EDGE, width=2)
    else:
        corners = [(x + r * a, y + r * b) for a, b in _OUTLINES[shape]]
        draw.polygon(corners, fill=colour, outline=_EDGE, width=2)


def _arc(
    x: float, y: float, r: float, start: float, end: float, steps: int = 16
) -> list[tuple[float, float]]:
    angles = [math.radians(start + (end - start) * n / steps) for n in range(steps + 1)]
    return [(x + r * math.cos(angle), y + r * math.sin(angle)) for angle in angles]


def _star() -> list[tuple[float, float]]:
    angles = [math.pi * n / 5 - math.pi / 2 for n in range(10)]
    radii = (1.0, 0.42) * 5
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


def _cross() -> list[tuple[float, float]]:
    arm = [(-0.34, -1.0), (0.34, -1.0), (0.34, -0.34)]
    turns = ((1, 0), (0, 1), (-1, 0), (0, -1))  # cosine and sine
    return [(x * c - y * s, x * s + y * c) for c, s in turns for x, y in arm]


_EDGE = (60, 60, 60)
_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "triangle": [(0, -1), (1, 0.9), (-1, 0.9)],
    "diamond": [(0, -1), (0.75, 0), (0, 1), (-0.75, 0)],
    "star": _star(),
    "cross": _cross(),
    "moon": [*_arc(0, 0, 1, 50, 310), *_arc(0.45, 0, 0.83, 292, 68, steps=24)],
    "heart": [*_arc(-0.5, -1 / 3, 0.5, 180, 360), *_arc(0.5, -1 / 3, 0.5, 180, 360), (0, 1)],
}
"""Corners around the middle of a shape of radius 1."""

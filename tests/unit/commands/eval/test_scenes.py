# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE, LETTERS, TEST_SCENES, scene
from anchorprune_vllm.commands.eval.vqa_data import SIMPLE_COLOURS, SIMPLE_SHAPES, Box, Picture

SEEDS = range(FIRST_TEST_SCENE, FIRST_TEST_SCENE + 150)


def things_in(picture: Picture) -> dict[str, str]:
    """shape -> colour, as the drawing's own data says, not the questions."""
    things, _, _ = picture.load.args
    return {shape: colour for colour, shape, _ in things}


def letter_in(picture: Picture) -> str:
    return picture.load.args[1]


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_same_seed_same_scene(seed: int) -> None:
    one, again, other = scene(seed), scene(seed), scene(seed + 1)
    assert one.questions == again.questions
    assert one.caption == again.caption
    pixels, same, different = (np.asarray(picture.load()) for picture in (one, again, other))
    assert np.array_equal(pixels, same)
    assert not np.array_equal(pixels, different)


def test_drawing_twice_gives_the_same_pixels() -> None:
    picture = scene(3)
    assert picture.load().tobytes() == picture.load().tobytes()


def test_every_answer_is_in_the_drawing() -> None:
    for seed in SEEDS:
        picture = scene(seed)
        colour_of = things_in(picture)
        shape_of = {colour: shape for shape, colour in colour_of.items()}
        assert len(shape_of) == len(colour_of), "a colour twice: its question has two answers"
        for question in picture.questions:
            if question.text == "what is the letter?":
                expected = letter_in(picture)
            elif found := re.fullmatch(r"what color is the (\w+)\?", question.text):
                expected = colour_of[found[1]]
            elif found := re.fullmatch(r"what is the (\w+) shape\?", question.text):
                expected = shape_of[found[1]]
            else:
                found = re.fullmatch(r"is there a (\w+) (\w+)\?", question.text)
                expected = "yes" if colour_of[found[2]] == found[1] else "no"
            assert question.answers == (expected,), (seed, question)


def test_kinds_say_what_is_asked() -> None:
    allowed = {
        "letter": LETTERS,
        "colour": SIMPLE_COLOURS,
        "shape": (*SIMPLE_SHAPES, "letter"),
        "yes/no": ("yes", "no"),
    }
    for seed in SEEDS:
        for question in scene(seed).questions:
            assert question.answers[0] in allowed[question.kind]


def test_yes_is_as_frequent_as_no() -> None:
    counts = Counter(q.answers for seed in SEEDS for q in scene(seed).questions)
    assert counts["yes",] == counts["no",] > 500


def test_a_letter_is_asked_for_where_there_is_one() -> None:
    with_letter = 0
    for seed in SEEDS:
        picture = scene(seed)
        asked = sum(question.kind == "letter" for question in picture.questions)
        assert asked == ("letter" in things_in(picture))
        with_letter += asked
    assert 0 < with_letter < len(SEEDS)
    assert {letter_in(scene(seed)) for seed in SEEDS} == {*LETTERS}


def test_the_caption_names_all_things() -> None:
    for seed in SEEDS:
        picture = scene(seed)
        letter = f" {letter_in(picture)}"
        named = {
            f"a {colour} {shape}{letter if shape == 'letter' else ''}"
            for shape, colour in things_in(picture).items()
        }
        assert {*picture.caption.split(" and ")} == named


def colours_of(pixels: np.ndarray, cell: int) -> np.ndarray:
    """The pixels of one of 3 x 3 cells that are not ground."""
    side = len(pixels) // 3
    row, column = divmod(cell, 3)
    part = pixels[row * side : (row + 1) * side, column * side : (column + 1) * side]
    ground = pixels[0, 0] if (pixels[0, 0] == pixels[0, -1]).all() else pixels[-1, -1]
    return part[(part != ground).any(axis=-1)]


def cell_of(box: Box) -> int:
    """The one of 3 x 3 cells in which the middle of a box is."""
    left, top, right, bottom = box
    return 3 * int(3 * (top + bottom) / 2) + int(3 * (left + right) / 2)


def test_a_question_knows_what_it_is_about() -> None:
    for seed in SEEDS[:50]:
        picture = scene(seed)
        box_of = {thing.shape: thing.box for thing in picture.things}
        for question in picture.questions:
            if question.kind == "colour":
                assert question.about == (box_of[question.text.split()[-1].rstrip("?")],)
            elif question.kind == "shape":
                assert question.about == (box_of[question.answers[0]],)
            else:
                assert len(question.about) == (question.answers != ("no",))


def test_things_are_drawn_in_their_cells_and_colours() -> None:
    looks = {
        "red": lambda r, g, b: r > 2 * max(g, b),
        "green": lambda r, g, b: g > 2 * max(r, b),
        "blue": lambda r, g, b: b > 2 * max(r, g),
        "yellow": lambda r, g, b: min(r, g) > 3 * b,
        "black": lambda r, g, b: max(r, g, b) < 50,
        "gray": lambda r, g, b: min(r, g, b) > 100,
        "teal": lambda r, g, b: min(g, b) > 3 * r,
        "brown": lambda r, g, b: r > g > b and r < 160,
    }
    for seed in SEEDS[:50]:
        picture = scene(seed)
        pixels = np.asarray(picture.load())
        for cell in range(9):
            drawn = colours_of(pixels, cell)
            here = [thing.colour for thing in picture.things if cell_of(thing.box) == cell]
            if not here:
                assert len(drawn) == 0, (seed, cell)
                continue
            # The median: letters have soft edges.
            red, green, blue = (int(value) for value in np.median(drawn, axis=0))
            assert looks[here[0]](red, green, blue), (seed, here, red, green, blue)


def test_enough_scenes_are_for_tests_alone() -> None:
    assert TEST_SCENES == 1000
    assert len({scene(seed).caption for seed in SEEDS}) > 0.9 * len(SEEDS)

# SPDX-License-Identifier: Apache-2.0
"""Cluttered scenes: what is asked has one answer, and it is in the drawing."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from anchorprune_vllm.commands.eval.clutter import (
    COLOURS,
    SHAPES,
    SIGN,
    THINGS,
    Thing,
    cluttered_scene,
)
from anchorprune_vllm.commands.eval.data import blind_guesses, load_data
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE
from anchorprune_vllm.commands.eval.vqa_data import Picture

SEEDS = range(FIRST_TEST_SCENE, FIRST_TEST_SCENE + 100)


def things_in(picture: Picture) -> list[Thing]:
    """As the drawing's own data says, not the questions."""
    things, _ = picture.load.args
    return things


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_same_seed_same_scene(seed: int) -> None:
    one, again, other = (cluttered_scene(number) for number in (seed, seed, seed + 1))
    assert one.questions == again.questions
    pixels, same, different = (np.asarray(each.load()) for each in (one, again, other))
    assert np.array_equal(pixels, same)
    assert not np.array_equal(pixels, different)


def test_no_two_things_are_alike_and_none_covers_another() -> None:
    for seed in SEEDS:
        things = things_in(cluttered_scene(seed))
        assert len({str(thing) for thing in things}) == THINGS
        assert len({(thing.row, thing.column) for thing in things}) == THINGS
        assert sum(thing.shape == SIGN for thing in things) == 4


def test_every_question_has_one_answer() -> None:
    for seed in SEEDS:
        picture = cluttered_scene(seed)
        things = things_in(picture)
        named = {str(thing): thing for thing in things}
        at = {(thing.row, thing.column): thing for thing in things}
        for question in picture.questions:
            text, (answer,) = question.text, question.answers
            if found := re.fullmatch(r"what color is the (\w+)\?", text):
                assert [each.colour for each in things if each.shape == found[1]] == [answer]
            elif found := re.fullmatch(r"what is the (\w+) shape\?", text):
                assert [each.shape for each in things if each.colour == found[1]] == [answer]
            elif found := re.fullmatch(r"what does the (\w+) sign say\?", text):
                assert " ".join(named[f"{found[1]} {SIGN}"].letters) == answer
            elif found := re.fullmatch(r"what is left of the (\w+ \w+)\?", text):
                thing = named[found[1]]
                assert at[thing.row, thing.column - 1].shape == answer
            else:
                found = re.fullmatch(r"is there an? (\w+ \w+)\?", text)
                assert ("yes" if found[1] in named else "no") == answer


def test_a_question_knows_what_it_is_about() -> None:
    for seed in SEEDS[:20]:
        picture = cluttered_scene(seed)
        named = {str(thing): thing for thing in things_in(picture)}
        for question in picture.questions:
            if question.answers == ("no",):
                assert question.about == ()
            if found := re.search(r"left of the (\w+ \w+)", question.text):
                thing, (left, top, right, bottom) = named[found[1]], question.about[0]
                assert left < (thing.column + 0.5) / 8 < right
                assert top < (thing.row + 0.5) / 8 < bottom
                assert question.about[1][2] == pytest.approx(left)


def test_what_is_not_there_has_near_copies() -> None:
    for seed in SEEDS:
        picture = cluttered_scene(seed)
        things = things_in(picture)
        (text,) = [each.text for each in picture.questions if each.answers == ("no",)]
        colour, shape = text.rstrip("?").split()[-2:]
        assert colour in {thing.colour for thing in things}
        assert shape in {thing.shape for thing in things}


def test_every_colour_comes_with_every_shape() -> None:
    seen = Counter(thing for seed in SEEDS for thing in map(str, things_in(cluttered_scene(seed))))
    assert len(seen) == len(COLOURS) * (len(SHAPES) + 1)


def test_guessing_without_the_picture_is_hard() -> None:
    (data,) = load_data(["clutter"], 1000)
    guesses = blind_guesses("clutter")
    right: dict[str, list[bool]] = {}
    for question in data.questions:
        guess = guesses.get(question.text, "")
        right.setdefault(question.kind, []).append(guess in question.answers)
    shares = {kind: np.mean(found) for kind, found in right.items()}
    assert shares.pop("yes/no") < 0.65
    assert max(shares.values()) < 0.25
    assert shares.keys() == {"colour", "shape", "text", "relation"}

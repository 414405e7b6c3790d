# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from anchorprune_vllm.commands.eval import scores
from anchorprune_vllm.commands.eval.scores import draws, interval, is_right, relative, score


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("yes", ["yes"], True),
        (" Yes.\n", ["yes"], True),
        ("yes", ["no", "YES."], True),
        ("yes ma'am", ["yes"], False),
        ("e.g", ["e.g."], True),
        ("", ["yes"], False),
        ("no", ["yes", "nothing"], False),
    ],
)
def test_is_right(answer: str, expected: list[str], right: bool) -> None:
    assert is_right(answer, expected) == right


def test_accuracy_in_all_and_by_kind() -> None:
    found = score([True, True, False, True, False], [0, 0, 0, 1, 1], ["b", "a", "b", "b", "a"])
    assert found.accuracy == pytest.approx(3 / 5)
    assert found.kinds == {"a": pytest.approx(1 / 2), "b": pytest.approx(2 / 3)}
    assert found.interval[0] <= found.accuracy <= found.interval[1]
    with pytest.raises(ValueError, match="no questions"):
        score([], [], [])


# Unequal numbers of questions: the mean over pictures would be another number.
PICTURE_OF = [0] * 5 + [1] + [2] * 3 + [7] * 2 + [8] * 4 + [9]
RIGHT = [True, True, True, True, False, False, True, False, True, False, False, *[True] * 4, False]


def test_interval_is_that_of_pictures_drawn_one_by_one() -> None:
    numbers = sorted({*PICTURE_OF})
    accuracies = []
    for times in draws(len(numbers), resamples=300, seed=5):
        # A list of questions as it is, with each drawn picture's appended as often as drawn.
        sample: list[bool] = []
        for number, count in zip(numbers, times, strict=True):
            asked = [ok for ok, p in zip(RIGHT, PICTURE_OF, strict=True) if p == number]
            sample += asked * int(count)
        accuracies.append(sum(sample) / len(sample))
    ordered = sorted(accuracies)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    expected = (at(0.025), at(0.975))
    assert interval(RIGHT, PICTURE_OF, resamples=300, seed=5) == pytest.approx(expected)


def test_draws_are_with_replacement_and_always_the_same() -> None:
    times = np.stack(list(draws(40)))
    assert times.shape == (scores.RESAMPLES, 40)
    assert (times.sum(axis=1) == 40).all()
    # Variance of how often one of n is drawn in n draws: 1 - 1/n.
    assert times.var() == pytest.approx(1 - 1 / 40, rel=0.02)
    assert np.array_equal(times, np.stack(list(draws(40))))


def test_interval_covers_the_truth_where_pictures_succeed_as_a_whole() -> None:
    # Ten questions on each picture, all right or all wrong: 60 coins, not 600.
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        coins = rng.random(60) < 0.7
        low, high = interval(np.repeat(coins, 10).tolist(), np.repeat(range(60), 10).tolist(), 500)
        covered += low <= 0.7 <= high
    assert 0.89 <= covered / 200 <= 0.99


def test_no_doubt_without_errors() -> None:
    assert interval([True] * 6, [0, 0, 1, 1, 2, 2]) == (1.0, 1.0)


def test_relative_by_hand() -> None:
    assert relative({"one": 0.6}, {"one": 0.8}) == pytest.approx(75.0)
    # Mean of 75 and 110, not 0.6 + 0.55 over 0.8 + 0.5.
    both = relative({"one": 0.6, "two": 0.55}, {"one": 0.8, "two": 0.5})
    assert both == pytest.approx(92.5)


@pytest.mark.parametrize(
    ("found", "full"),
    [({"one": 0.5}, {}), ({"one": 0.5}, {"one": 0.0}), ({"one": 0.5}, {"one": 0.5, "two": 0.5})],
)
def test_relative_has_no_value_without_a_full_score(found: dict, full: dict) -> None:
    assert relative(found, full) is None


def test_one_picture_says_nothing_about_others() -> None:
    assert interval([True, True, False], [7, 7, 7]) == (0.0, 1.0)
    assert interval([True, False, True], [7, 7, 8]) == (0.5, 1.0)

# SPDX-License-Identifier: Apache-2.0
"""Right and wrong answers as scores: accuracy, its interval, and Rel. of the AnchorPrune paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
_AT_ONCE = 2**22  # numbers of one block of resamples: 32 MiB


@dataclass(frozen=True)
class Score:
    """Shares of right answers, 0 to 1."""

    accuracy: float
    low: float
    """`low` to `high`: 95% of the resamples."""
    high: float
    kinds: dict[str, float]
    """Accuracy of each kind of question."""


def is_right(answer: str, expected: Sequence[str]) -> bool:
    """Whether an answer is one of the expected ones, but for case, space and a final full stop."""
    return _normalised(answer) in map(_normalised, expected)


def score(right: Sequence[bool], picture_of: Sequence[int], kind_of: Sequence[str]) -> Score:
    """All figures of one run; the sequences have one entry for each question."""
    if not right:
        raise ValueError("no questions, no score")
    correct = np.asarray(right, dtype=float)
    low, high = interval(right, picture_of)
    kinds = np.asarray(kind_of)
    return Score(
        accuracy=float(correct.mean()),
        low=low,
        high=high,
        kinds={str(kind): float(correct[kinds == kind].mean()) for kind in np.unique(kinds)},
    )


def interval(
    right: Sequence[bool], picture_of: Sequence[int], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95% interval of the accuracy, by bootstrap over pictures.

    Questions about one picture succeed and fail together: pictures are drawn, not questions. One
    picture alone says nothing about others: 0 to 1.
    """
    pictures, place = np.unique(np.asarray(picture_of), return_inverse=True)
    if len(pictures) == 1:
        return 0.0, 1.0
    asked = np.bincount(place).astype(float)
    correct = np.bincount(place, weights=np.asarray(right, dtype=float))
    drawn = [
        (times @ correct) / (times @ asked)
        for times in draws(len(pictures), resamples=resamples, seed=seed)
    ]
    low, high = np.percentile(np.concatenate(drawn), [2.5, 97.5])
    return float(low), float(high)


def draws(
    pictures: int, resamples: int = RESAMPLES, seed: int = 0
) -> Iterator[NDArray[np.float64]]:
    """How many times each picture is drawn: blocks [resamples, pictures], the same at each call."""
    rng = np.random.default_rng(seed)
    rows = max(1, _AT_ONCE // pictures)
    for start in range(0, resamples, rows):
        count = min(rows, resamples - start)
        yield rng.multinomial(pictures, np.full(pictures, 1 / pictures), size=count).astype(float)


def relative(accuracies: Mapping[str, float], full: Mapping[str, float]) -> float | None:
    """Rel. of the paper: mean over data sets of accuracy / accuracy unpruned, in percent.

    None where it has no value: a data set is missing, or the unpruned model answers nothing.
    """
    if not full or accuracies.keys() != full.keys() or not all(full.values()):
        return None
    return 100 * float(np.mean([accuracies[name] / full[name] for name in full]))


def _normalised(text: str) -> str:
    return text.strip().lower().removesuffix(".").strip()

# SPDX-License-Identifier: Apache-2.0
"""Right and wrong answers as scores: accuracy, its 95% interval, and the paper's Rel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000


@dataclass(frozen=True)
class RunScore:
    """Shares of right answers, from 0 to 1."""

    accuracy: float
    interval: tuple[float, float]
    """Of 95% of the resamples, the lowest and the highest accuracy."""
    kinds: dict[str, float]
    """Accuracy of each kind of question."""


def is_right(answer: str, expected: Sequence[str]) -> bool:
    """Compare an answer with those expected, ignoring case, space and a full stop at the end."""
    return _normalised(answer) in map(_normalised, expected)


def _normalised(text: str) -> str:
    return text.strip().lower().removesuffix(".").strip()


def score(right: Sequence[bool], picture_of: Sequence[int], kind_of: Sequence[str]) -> RunScore:
    """RunScore a run; the sequences have an entry for each question."""
    if not right:
        raise ValueError("no questions, no score")
    correct, kinds = np.asarray(right, dtype=float), np.asarray(kind_of)
    return RunScore(
        accuracy=float(correct.mean()),
        interval=interval(right, picture_of),
        kinds={str(kind): float(correct[kinds == kind].mean()) for kind in np.unique(kinds)},
    )


def interval(
    right: Sequence[bool], picture_of: Sequence[int], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95% interval of the accuracy, by a bootstrap over images.

    Images are drawn and not questions, because the questions about an image succeed and fail
    together. A single image says nothing about others: its interval is 0 to 1.
    """
    pictures, place = np.unique(np.asarray(picture_of), return_inverse=True)
    if len(pictures) == 1:
        return 0.0, 1.0
    asked = np.bincount(place).astype(float)
    correct = np.bincount(place, weights=np.asarray(right, dtype=float))
    drawn = draws(len(pictures), resamples, seed)
    accuracies = [(times @ correct) / (times @ asked) for times in drawn]
    low, high = np.percentile(accuracies, [2.5, 97.5])
    return float(low), float(high)


def draws(
    pictures: int, resamples: int = RESAMPLES, seed: int = 0
) -> Iterator[NDArray[np.float64]]:
    """Draw images with replacement; yield for each resample how often each image was drawn.

    The same arguments give the same numbers.
    """
    rng = np.random.default_rng(seed)
    for _ in range(resamples):
        yield rng.multinomial(pictures, np.full(pictures, 1 / pictures)).astype(float)


def relative(accuracies: Mapping[str, float], full: Mapping[str, float]) -> float | None:
    """Return Rel.: the mean over data sets of accuracy / accuracy unpruned, in percent.

    It is None if a data set is missing, or if the unpruned model has no right answer.
    """
    if not full or accuracies.keys() != full.keys() or not all(full.values()):
        return None
    return 100 * float(np.mean([accuracies[name] / full[name] for name in full]))

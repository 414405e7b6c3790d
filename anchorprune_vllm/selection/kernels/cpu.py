# SPDX-License-Identifier: Apache-2.0
"""Stage 2 of one item on a CPU, compiled by numba: exact, with few of the N x K distances.

Scores only fall as the kept set grows, so an old score is an upper bound. The token with the best
old score is compared with what was kept since it was last looked at; it is the choice if it stays
on top, and otherwise waits at its new score. Most tokens are hardly looked at.

Distances are exact (`exact_cosine.py`), so it does not matter which of them are computed, or when.
A product of 16-bit numbers tells first whether a distance can be a new minimum: its error has a
bound, and it is twice as fast as one of float32, as it reads half as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from llvmlite.binding import ffi
from numpy.typing import NDArray
from torch import Tensor

from anchorprune_vllm.selection.exact_cosine import GRID, MAX_DISTANCE
from anchorprune_vllm.selection.scores import Score

# llvmlite's library answers every name with a function of LLVM's, `__dict__` too. When an engine
# starts on a CPU, vLLM looks into the `__dict__` of all there is, and would not start after this
# import, as a second one in the same process does.
ffi.lib._fntab["__dict__"] = {}

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Floats = NDArray[Any]
_Numbers = NDArray[Any]

COARSE = 2.0**15 - 1
"""Of the 16-bit grid. A row is this long on it: its products fit in 32 bits."""


def _compiled(function: _Function) -> _Function:
    """Without the interpreter's lock, sums in any order; kept on disk where there is a place."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(**options)(function)


def expand(features: Tensor, score: Score, anchor: Tensor, budget: int) -> Tensor:
    """Choose the tokens of one item as `contextual_expansion` does."""
    wide = features if features.dtype in (torch.float32, torch.float64) else features.float()
    chosen = _expand(
        wide.contiguous().numpy(),
        score.weight.contiguous().numpy(),
        score.adds,
        anchor.nonzero().flatten().numpy(),
        budget,
    )
    return torch.from_numpy(chosen)


@_compiled
def _expand(
    features: _Floats, weight: _Floats, adds: bool, anchor: _Numbers, budget: int
) -> _Numbers:
    tokens, width = features.shape
    count = len(anchor)
    kept = np.empty((budget, width), np.float32)  # in the order of choice
    kept_coarse = np.empty((budget, width), np.int16)
    kept_half = np.empty(budget)
    chosen = np.empty(budget, np.int64)
    chosen[:count] = anchor

    # Of each token: its unit row, a coarse one and half its square, once somebody looks at it; how
    # many of the kept it was compared with; its distance to the nearest of them; its score by that.
    rows = np.empty((tokens, width), np.float32)
    coarse = np.empty((tokens, width), np.int16)
    half = np.empty(tokens)
    is_ready = np.zeros(tokens, np.bool_)
    compared = np.zeros(tokens, np.int64)
    novelty = np.full(tokens, MAX_DISTANCE)
    score = weight + MAX_DISTANCE if adds else weight * MAX_DISTANCE
    for place in range(count):
        score[anchor[place]] = -np.inf
        kept_half[place] = _unit_row(features[anchor[place]], kept[place], kept_coarse[place])
    best = _tournament(score)

    error = _coarse_error(width)
    while count < budget:
        token = best[1]
        if compared[token] == count:
            chosen[count] = token
            if not is_ready[token]:  # without an anchor, the first choice
                half[token] = _unit_row(features[token], rows[token], coarse[token])
            kept[count] = rows[token]
            kept_coarse[count] = coarse[token]
            kept_half[count] = half[token]
            count += 1
            score[token] = -np.inf
            _play(best, score, token)
            continue
        if not is_ready[token]:
            half[token] = _unit_row(features[token], rows[token], coarse[token])
            is_ready[token] = True
        row, nearest, rival = rows[token], novelty[token], _second(best, score, token)
        place = compared[token]
        while place < count:
            least = (1 - nearest - error) * COARSE**2
            place = _first_near(coarse[token], kept_coarse, place, count, least)
            if place == count:
                break
            distance = half[token] + kept_half[place] - _product(row, kept[place])
            nearest = min(nearest, distance)
            place += 1
            if _score(weight[token], nearest, adds) < rival:
                break
        compared[token] = place
        if nearest < novelty[token]:
            novelty[token] = nearest
            score[token] = _score(weight[token], nearest, adds)
            _play(best, score, token)
    return chosen


@_compiled
def _score(weight: float, novelty: float, adds: bool) -> float:
    return weight + novelty if adds else weight * novelty


@_compiled
def _unit_row(features: _Floats, row: _Floats, coarse: _Numbers) -> float:
    """`cosine.unit_rows` of one token, the same on the coarse grid, its `cosine.half_squares`."""
    norm = np.sqrt(_product(features, features))
    if 0 < norm < np.inf:
        for d in range(len(row)):
            row[d] = np.rint(features[d] / norm * GRID) / GRID
    else:  # zero, or not finite
        row[:] = 0
    for d in range(len(row)):
        coarse[d] = np.rint(row[d] * COARSE)
    return _product(row, row) / 2 or 0.5


@_compiled
def _coarse_error(width: int) -> float:
    """By how much 1 - coarse product may be off from the distance.

    Two rows off by half a step in each entry change their product by sqrt(width) / COARSE, to first
    order. A tenth more is ample for the rest, and for lengths that are not quite 1.
    """
    return 1.1 * np.sqrt(width) / COARSE


@_compiled
def _first_near(coarse: _Numbers, kept: _Numbers, place: int, count: int, least: float) -> int:
    """The first place from `place` on whose coarse product is above `least`, or `count`."""
    while place < count and _coarse_product(coarse, kept[place]) <= least:
        place += 1
    return place


@_compiled
def _coarse_product(one: _Numbers, other: _Numbers) -> np.int32:
    total = np.int32(0)
    for d in range(len(one)):  # numba's own sum of 32-bit numbers would be one of 64 bits
        total = np.int32(total + np.int32(np.int32(one[d]) * np.int32(other[d])))
    return total


@_compiled
def _product(one: _Floats, other: _Floats) -> float:
    total = 0.0
    for d in range(len(one)):
        total += np.float64(one[d]) * np.float64(other[d])
    return total


@_compiled
def _tournament(score: _Floats) -> _Numbers:
    """The token of the best score under each node of a binary tree; the winner of all is at 1.

    The lower of equals wins: tokens are the leaves in order, and the left one of a pair wins ties.
    """
    leaves = 1
    while leaves < len(score):
        leaves *= 2
    best = np.full(2 * leaves, -1)  # -1: no token
    best[leaves : leaves + len(score)] = np.arange(len(score))
    for node in range(leaves - 1, 0, -1):
        best[node] = _winner(best, score, node)
    return best


@_compiled
def _play(best: _Numbers, score: _Floats, token: int) -> None:
    """All matches of a token whose score has changed."""
    node = (len(best) // 2 + token) // 2
    while node:
        best[node] = _winner(best, score, node)
        node //= 2


@_compiled
def _winner(best: _Numbers, score: _Floats, node: int) -> int:
    left, right = best[2 * node], best[2 * node + 1]
    return left if right < 0 or score[left] >= score[right] else right


@_compiled
def _second(best: _Numbers, score: _Floats, token: int) -> float:
    """The best score of all the others: the best of those that a token has won against."""
    second = -np.inf
    node = len(best) // 2 + token
    while node > 1:
        other = best[node ^ 1]
        if other >= 0:
            second = max(second, score[other])
        node //= 2
    return second

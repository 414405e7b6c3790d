# SPDX-License-Identifier: Apache-2.0
"""Stage 2 of one item on a CPU, compiled by numba; exact, with few of the N x K distances.

Scores only fall as the kept set grows, so an old score is an upper bound. The token with the best
old score is compared with the tokens that were kept since its last comparison. It is the choice if
it stays on top; otherwise it waits with its new score. Most tokens are rarely compared.

Distances are exact (`exact_cosine.py`), so it does not matter which of them are computed, or when.
A product of 16-bit numbers first tells whether a distance can be a new minimum. Its error is
bounded, and it is twice as fast as a product in float32, because it reads half as much.
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

# llvmlite's library returns a function of LLVM for every attribute name, even `__dict__`. When an
# engine starts on a CPU, vLLM reads the `__dict__` of all objects, so a second engine in the same
# process would fail to start after this import.
ffi.lib._fntab["__dict__"] = {}

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Floats = NDArray[Any]
_Numbers = NDArray[Any]

COARSE = 2.0**15 - 1
"""The scale of the 16-bit grid: rows have this length on it, so their products fit in 32 bits."""


def _compiled(function: _Function) -> _Function:
    """Compile a function that releases the GIL and may sum in any order; cache it if possible."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache is writable
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

    # For each token: its unit row, coarse row and half square, made at its first comparison; the
    # number of kept tokens it was compared with; its distance to the nearest one; its score.
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
            if not is_ready[token]:  # only the first choice without an anchor
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
    """Write the unit row of a token and its coarse row, and return half the square of the former.

    These are `unit_rows` and `half_squares` of `exact_cosine.py`.
    """
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
    """Return the largest difference between a distance and 1 - coarse product.

    Two rows that are off by half a step in each entry change their product by sqrt(width) / COARSE,
    to first order. A tenth more covers the rest, and lengths that are not exactly 1.
    """
    return 1.1 * np.sqrt(width) / COARSE


@_compiled
def _first_near(coarse: _Numbers, kept: _Numbers, place: int, count: int, least: float) -> int:
    """Return the first place from `place` on whose coarse product exceeds `least`, or `count`."""
    while place < count and _coarse_product(coarse, kept[place]) <= least:
        place += 1
    return place


@_compiled
def _coarse_product(one: _Numbers, other: _Numbers) -> np.int32:
    total = np.int32(0)
    for d in range(len(one)):  # numba would widen a plain sum of 32-bit numbers to 64 bits
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
    """Return a binary tree with the best token under each node; the best of all is at node 1.

    Ties go to the lower index: tokens are the leaves in order, and the left one of a pair wins.
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
    """Update the tree for a token whose score has changed."""
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
    """Return the best score of all other tokens, given the token that is currently best."""
    second = -np.inf
    node = len(best) // 2 + token
    while node > 1:
        other = best[node ^ 1]
        if other >= 0:
            second = max(second, score[other])
        node //= 2
    return second

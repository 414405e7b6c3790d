# SPDX-License-Identifier: Apache-2.0
"""The published selectors and the paper's ablations, as their rules say it: loops and no torch.

Tokens are given in the order in which the language model gets them; methods that merge also give
the weight of every token in every row. Of equal scores the lower index is first.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from tests.support.reference.selection import adaptive_anchor, largest_remainder


class Tokens(NamedTuple):
    """One image or video; float64 throughout."""

    relevance: np.ndarray | None  # [N]
    features: np.ndarray  # [N, D1]
    importance: np.ndarray  # [N]
    budget: int
    context: np.ndarray  # [N, D2]
    projected: np.ndarray  # [N, H]
    keys: np.ndarray  # [N, heads, head size]
    object_attention: np.ndarray  # [N]
    grids: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return len(self.importance)

    @property
    def kept(self) -> int:
        return min(self.budget, self.count)

    @property
    def units(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.grids)), [rows * cols for rows, cols in self.grids])


class Merged(NamedTuple):
    indices: list[int]
    weights: np.ndarray  # [K, N]


def cosines(vectors: np.ndarray) -> np.ndarray:
    """[N, N]; 0 for a vector without a direction, and copies are at 1 and not near it."""
    lengths = np.sqrt((vectors**2).sum(axis=1))
    products = vectors @ vectors.T
    for i, row in enumerate(products):
        for j in range(len(row)):
            row[j] = row[j] / (lengths[i] * lengths[j]) if lengths[i] and lengths[j] else 0.0
    return np.round(products, 12)


def ranking(scores: Sequence[float] | np.ndarray, tokens: Sequence[int] | None = None) -> list[int]:
    """Highest first."""
    tokens = range(len(scores)) if tokens is None else tokens
    return sorted(tokens, key=lambda token: (-scores[token], token))


# --- FasterVLM ---


def fastervlm(tokens: Tokens) -> list[int]:
    return sorted(ranking(tokens.importance)[: tokens.kept])


# --- VisionZip ---


def visionzip(tokens: Tokens, share: Fraction = Fraction(10, 64)) -> Merged:
    contextual = round(tokens.kept * share)
    dominant = sorted(ranking(tokens.importance)[: tokens.kept - contextual])
    rest = [token for token in range(tokens.count) if token not in dominant]
    targets: list[int] = []
    if contextual:
        step = max(1, len(rest) // contextual)
        targets = rest[::step][:contextual]
    similarity = cosines(tokens.keys.mean(axis=1))
    groups: dict[int, list[int]] = {target: [] for target in targets}
    for token in rest:
        if targets and token not in targets:
            groups[max(targets, key=lambda target: (similarity[token][target], -target))] += [token]
    weights = np.zeros((tokens.kept, tokens.count))
    for row, token in enumerate([*dominant, *targets]):
        weights[row, token] = 1
        for member in groups.get(token, []):
            weights[row, member] = 1 / len(groups[token])
    return Merged([*dominant, *targets], weights)


# --- DivPrune ---


def divprune(tokens: Tokens) -> list[int]:
    distances = 1 - cosines(tokens.projected)
    kept: list[int] = []
    while len(kept) < tokens.kept:
        left = [token for token in range(tokens.count) if token not in kept]
        apart = {}
        for token in left:
            others = kept or [other for other in left if other != token]
            apart[token] = min((distances[token][other] for other in others), default=0.0)
        kept.append(max(left, key=lambda token: (apart[token], -token)))
    return sorted(kept)


# --- CDPruner ---


def cdpruner(tokens: Tokens) -> tuple[list[int], list[float]]:
    """Tokens in the order of choice, each with the factor by which it grew the determinant.

    A factor of about 0 is no choice: whatever is left, the kept ones span it already.
    """
    quality = np.ones(tokens.count)
    if tokens.relevance is not None and tokens.relevance.max() > tokens.relevance.min():
        low, high = tokens.relevance.min(), tokens.relevance.max()
        quality = (tokens.relevance - low + 1e-6) / (high - low)
    kernel = quality[:, None] * cosines(tokens.projected) * quality[None, :]
    kept: list[int] = []
    factors = []
    while len(kept) < tokens.kept:
        among = kernel[np.ix_(kept, kept)]
        best, best_factor = -1, -np.inf
        explained = np.linalg.pinv(among, hermitian=True) @ kernel[kept] if kept else None
        for token in range(tokens.count):
            if token in kept:
                continue
            # A cosine with itself is 1, whatever rounding says; a zero vector has none.
            factor = float(quality[token] ** 2 * tokens.projected[token].any())
            if explained is not None:
                factor -= float(kernel[kept, token] @ explained[:, token])
            if factor > best_factor:
                best, best_factor = token, factor
        kept.append(best)
        factors.append(best_factor)
    return kept, factors


def stretched(scores: np.ndarray) -> np.ndarray:
    """To 0..1; 1 if all are equal."""
    if scores.max() == scores.min():
        return np.ones(len(scores))
    return (scores - scores.min()) / (scores.max() - scores.min())


# --- PruMerge+ ---


def prumerge_plus(tokens: Tokens, neighbours: int = 32) -> Merged:
    """K - 1 tokens, a quarter by attention and the others at equal steps; then one for the rest."""
    ranked = ranking(tokens.importance)
    if tokens.kept in (1, tokens.count):
        kept = sorted(ranked[: tokens.kept])
        return Merged(kept, np.eye(tokens.count)[kept])

    important = ranked[: max(1, round(Fraction(tokens.kept - 1, 4)))]
    free = [token for token in range(tokens.count) if token not in important]
    spaced = tokens.kept - 1 - len(important)
    kept = important + [free[place * len(free) // spaced] for place in range(spaced)]

    similarity = cosines(tokens.keys.reshape(tokens.count, -1))
    weights = np.zeros((tokens.kept, tokens.count))
    for row, token in enumerate(kept):
        weights[row, token] = 1
        others = [other for other in range(tokens.count) if other != token]
        for other in ranking(similarity[token], others)[:neighbours]:
            weights[row, other] = tokens.importance[other]
    rest = [token for token in range(tokens.count) if token not in kept]
    for token in rest:
        weights[-1, token] = tokens.importance[token]
    return Merged([*kept, ranking(tokens.importance, rest)[0]], weights)


# --- VisPruner ---


def vispruner(tokens: Tokens, important_ratio: float = 0.5) -> list[int]:
    similarity = cosines(tokens.context)
    ranked = ranking(tokens.importance)
    important = int(tokens.kept * important_ratio)
    kept, residual = ranked[:important], ranked[important:]
    diverse = tokens.kept - important
    while len(residual) > diverse:
        even, odd = residual[::2], residual[1::2]
        drop = min(8, len(residual) - diverse, len(even))
        nearest = [max((similarity[a][b] for b in odd), default=0.0) for a in even]
        by_similarity = sorted(range(len(even)), key=lambda place: (-nearest[place], place))
        residual = [even[place] for place in by_similarity[drop:]] + odd
    return sorted(kept + residual)


# --- HiPrune ---


def hiprune(tokens: Tokens, alpha: float = 0.1) -> list[int]:
    """The released alpha leaves room for all neighbours; with a larger one importance decides."""
    anchors = ranking(tokens.object_attention)[: round(tokens.kept * alpha / 5)]
    around = {near for anchor in anchors for near in neighbours_of(anchor, tokens.grids)}
    by_importance = ranking(tokens.importance)
    near = [token for token in by_importance if token in around]
    kept: list[int] = []
    for token in [*anchors, *near, *by_importance]:
        if token not in kept and len(kept) < tokens.kept:
            kept.append(token)
    return sorted(kept)


def neighbours_of(token: int, grids: Sequence[tuple[int, int]]) -> list[int]:
    """Above, below, left, right."""
    start = 0
    for rows, columns in grids:
        if token < start + rows * columns:
            break
        start += rows * columns
    row, column = divmod(token - start, columns)
    places = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return [start + r * columns + c for r, c in places if 0 <= r < rows and 0 <= c < columns]


# --- SCOPE ---


def scope(tokens: Tokens, alpha: float = 1.0) -> list[int]:
    similarity = cosines(tokens.context)
    covered = np.zeros(tokens.count)
    kept: list[int] = []
    while len(kept) < tokens.kept:
        best, best_gain = -1, -np.inf
        for token in range(tokens.count):
            if token in kept:
                continue
            more = float(np.maximum(0, similarity[:, token] - covered).sum())
            gain = more * float(tokens.importance[token]) ** alpha
            if gain > best_gain:
                best, best_gain = token, gain
        kept.append(best)
        covered = np.maximum(covered, similarity[:, best])
    return sorted(kept)


# --- AnchorPrune's ablations ---


def anchorprune(tokens: Tokens, stage2: str) -> tuple[list[int], int]:
    """Tokens in the order of choice, the anchor by falling relevance; and the anchor's size."""
    anchor: list[int] = []
    if tokens.relevance is not None:
        unit_of = tokens.units
        members = [np.flatnonzero(unit_of == unit) for unit in range(len(tokens.grids))]
        shares = largest_remainder(tokens.kept, [len(unit) for unit in members])
        for unit, share in zip(members, shares, strict=True):
            if share:
                features = directions(tokens.features[unit])
                found = adaptive_anchor(tokens.relevance[unit], features, share)
                anchor += [int(unit[place]) for place in found]
        anchor = ranking(tokens.relevance, anchor)
    asked = np.ones(tokens.count)
    if tokens.relevance is not None:
        asked = stretched(tokens.relevance)
    distances = np.maximum(0, 1 - cosines(tokens.context))
    kept = list(anchor)
    while len(kept) < tokens.kept:
        best, best_worth = -1, -np.inf
        for token in range(tokens.count):
            if token in kept:
                continue
            novelty = distances[token, kept].min() if kept else 2.0
            if stage2 == "importance":
                worth = tokens.importance[token] * novelty
            elif stage2 == "diversity":
                worth = novelty
            elif stage2 == "additive":
                worth = asked[token] + novelty
            else:
                worth = asked[token] * novelty
            if worth > best_worth:
                best, best_worth = token, worth
        kept.append(best)
    return kept, len(anchor)


def directions(vectors: np.ndarray) -> np.ndarray:
    lengths = np.sqrt((vectors**2).sum(axis=1, keepdims=True))
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)

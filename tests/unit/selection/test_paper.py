# SPDX-License-Identifier: Apache-2.0
"""Selection against the paper's equations, written out as loops over numbers."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anchorprune_vllm.selection import KeptTokens, anchor_prune


class Case(NamedTuple):
    relevance: np.ndarray | None
    features: np.ndarray
    importance: np.ndarray
    budget: int
    context_features: np.ndarray | None = None
    units: np.ndarray | None = None
    params: dict = {}  # noqa: RUF012


# --- The paper, one equation after the other. Indices count from 0, sizes from 1. ---


def cosine_distance(one: np.ndarray, other: np.ndarray) -> float:
    dot = sum(float(a) * float(b) for a, b in zip(one, other, strict=True))
    lengths = [sum(float(a) ** 2 for a in vector) ** 0.5 for vector in (one, other)]
    cosine = dot / (lengths[0] * lengths[1]) if all(lengths) else 0.0
    return max(0.0, 1 - cosine)


def all_distances(features: np.ndarray) -> list[list[float]]:
    return [[cosine_distance(one, other) for other in features] for one in features]


def novelty(token: int, kept: list[int], distances: list[list[float]]) -> float:
    return min(distances[token][other] for other in kept)


def share_budget(total: int, sizes: list[int]) -> list[int]:
    """Hand out the tokens one by one, each to the unit that is owed the most."""
    quotas = [Fraction(total * size, sum(sizes)) for size in sizes]
    given_out = [int(quota) for quota in quotas]
    owed = [quota - got for quota, got in zip(quotas, given_out, strict=True)]
    while sum(given_out) < total:
        unit = owed.index(max(owed))
        given_out[unit] += 1
        owed[unit] -= 1
    return given_out


def anchor_of_unit(
    case: Case, tokens: list[int], budget: int, distances: list[list[float]]
) -> list[int]:
    if budget == 0:
        return []
    tau = case.params.get("tau", 0.2)
    patience = case.params.get("patience", 3)
    ratio = Fraction(str(case.params.get("max_anchor_ratio", 0.5)))
    k_min = case.params.get("min_anchor") or max(1, 5 * budget // 32)
    k_min = min(k_min, budget)
    k_max = max(k_min, int(ratio * budget))
    ranking = sorted(tokens, key=lambda token: (-case.relevance[token], token))
    first = ranking[:k_min]
    events = 0
    for size in range(k_min + 1, k_max + 1):
        if novelty(ranking[size - 1], first, distances) > tau:
            events += 1
            if events >= patience:
                return ranking[:size]
    return ranking[:k_max]


def paper(case: Case) -> tuple[list[int], list[bool]]:
    n = len(case.features)
    budget = min(case.budget, n)
    anchor: list[int] = []
    if case.relevance is not None:
        distances = all_distances(case.features)
        numbers = [0] * n if case.units is None else case.units.tolist()
        groups = [[t for t in range(n) if numbers[t] == unit] for unit in sorted(set(numbers))]
        shares = share_budget(budget, [len(group) for group in groups])
        for group, share in zip(groups, shares, strict=True):
            anchor += anchor_of_unit(case, group, share, distances)
    context = case.features if case.context_features is None else case.context_features
    distances = all_distances(context)
    kept = list(anchor)
    while len(kept) < budget:
        best, best_score = -1, -np.inf
        for token in range(n):
            if token in kept:
                continue
            score = float(case.importance[token])
            if kept:
                score *= novelty(token, kept, distances)
            if score > best_score:
                best, best_score = token, score
        kept.append(best)
    return sorted(kept), [token in anchor for token in sorted(kept)]


# --- Cases ---


def exact_vectors(rng: np.random.Generator, n: int) -> np.ndarray:
    """Rows of -1, 0, 1 with 0, 1, 4 or 16 of them not 0: their lengths and cosines are exact."""
    width = 18
    variety = rng.integers(1, n + 1)  # the fewer, the more duplicates
    pool = np.zeros((variety, width))
    for row in pool:
        places = rng.permutation(width)[: rng.choice([0, 1, 4, 4, 16, 16])]
        row[places] = rng.choice([-1.0, 1.0], size=len(places))
    return pool[rng.integers(0, variety, size=n)]


@st.composite
def cases(draw: st.DrawFn, exact: bool) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = draw(
        st.one_of(
            st.integers(1, 30).map(lambda n: [n]),
            st.lists(st.integers(1, 9), min_size=1, max_size=5),
            st.integers(2, 12).map(lambda n: [1] * n),
            st.tuples(st.integers(1, 10), st.integers(20, 30)).map(list),  # different K_min
        )
    )
    n = sum(sizes)
    budget = draw(st.one_of(st.integers(1, n), st.sampled_from([1, max(1, n - 1), n, n + 3])))
    has_query = draw(st.integers(0, 4)) > 0

    def scores() -> np.ndarray:
        if not exact:
            return rng.random(n)
        return rng.integers(0, rng.choice([1, 3, 9]), size=n) / 8  # many ties, perhaps all

    def vectors() -> np.ndarray:
        return exact_vectors(rng, n) if exact else rng.standard_normal((n, 12))

    return Case(
        relevance=scores() - 0.5 if has_query else None,
        features=vectors(),
        importance=scores(),
        budget=budget,
        context_features=vectors() if draw(st.booleans()) else None,
        units=np.repeat(np.arange(len(sizes)) * 2 + 3, sizes) if draw(st.booleans()) else None,
        params={
            "min_anchor": draw(st.sampled_from([None, None, 1, 2, 5, 40])),
            "tau": draw(st.sampled_from([0.2, 0.0, 0.25, 0.5, 1.0, 2.0])),
            "patience": draw(st.sampled_from([3, 1, 2, 100])),
            "max_anchor_ratio": draw(st.sampled_from([0.5, 0.3, 0.7, 1.0, 0.01])),
        },
    )


def select(case: Case, dtype: torch.dtype = torch.float64) -> KeptTokens:
    def tensor(array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array).to(dtype)

    return anchor_prune(
        tensor(case.relevance),
        tensor(case.features),
        tensor(case.importance),
        case.budget,
        tensor(case.context_features),
        None if case.units is None else torch.from_numpy(case.units),
        **case.params,
    )


def check(case: Case, dtype: torch.dtype = torch.float64) -> None:
    kept = select(case, dtype)
    indices, is_anchor = paper(case)
    assert kept.indices.tolist() == indices
    assert kept.is_anchor.tolist() == is_anchor
    assert kept.indices.dtype == torch.int64
    assert kept.is_anchor.dtype == torch.bool


@settings(deadline=None, max_examples=300)
@given(cases(exact=True), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_ties_zeros_and_duplicates(case, dtype):
    check(case, dtype)


@settings(deadline=None, max_examples=150)
@given(cases(exact=False))
def test_generic_numbers(case):
    check(case)


# --- One behaviour at a time, with the answer worked out by hand. ---

APART = np.eye(64)  # every token novel to every other: distance 1
ALIKE = np.ones((64, 4))  # no token novel: distance 0
FALLING = np.linspace(1, 0, 64)  # relevance in native order
FLAT = np.ones(64)


def anchor_size(case: Case) -> int:
    check(case)
    return int(select(case).is_anchor.sum())


def test_anchor_ends_with_the_third_novel_token_included():
    assert anchor_size(Case(FALLING, APART, FLAT, 32)) == 5 + 3


def test_anchor_without_novelty_is_half_the_budget():
    assert anchor_size(Case(FALLING, ALIKE, FLAT, 32)) == 16


def test_novelty_is_to_the_first_tokens_only():
    """Tokens 5 to 9 are alike: each is novel to the first five, though not to one another."""
    features = APART.copy()
    features[5:] = APART[5]
    assert anchor_size(Case(FALLING, features, FLAT, 32)) == 5 + 3


def test_novelty_must_exceed_tau():
    features = np.tile([1.0, 1, 1, 1], (64, 1))
    features[1:] = [1, 0, 0, 0]  # cosine 1/2 with the first
    at_tau = {"min_anchor": 1, "tau": 0.5}
    below = {"min_anchor": 1, "tau": 0.49}
    assert anchor_size(Case(FALLING, features, FLAT, 32, params=at_tau)) == 16
    assert anchor_size(Case(FALLING, features, FLAT, 32, params=below)) == 1 + 3


def test_anchor_is_never_above_its_maximum_even_if_more_is_novel():
    assert anchor_size(Case(FALLING, APART, FLAT, 32, params={"max_anchor_ratio": 0.2})) == 6


def test_the_smallest_budgets_keep_one_anchor_token(subtests):
    for budget in (1, 2, 3):
        with subtests.test(budget=budget):
            assert anchor_size(Case(FALLING, APART, FLAT, budget)) == 1


def test_units_do_not_compete_for_the_anchor():
    """The second unit's relevance is lower throughout; it has its own anchor, its own novelty."""
    units = np.repeat([0, 1], 32)
    kept = select(Case(FALLING, APART, FLAT, 32, units=units))
    anchor = kept.indices[kept.is_anchor].tolist()
    assert anchor == [0, 1, 2, 3, 4, 32, 33, 34, 35, 36]  # twice K_min = 2 and three novel ones


def test_units_of_different_size_have_their_own_minimum():
    """K_u = 32 and 8, so K_min = 5 and 1: the first novel token is the sixth, and the second."""
    units = np.repeat([0, 1], [64, 16])
    case = Case(np.linspace(1, 0, 80), np.eye(80), np.ones(80), 40, None, units, {"patience": 1})
    check(case)
    kept = select(case)
    assert kept.indices[kept.is_anchor].tolist() == [0, 1, 2, 3, 4, 5, 64, 65]


def test_expansion_sees_all_units():
    """One unit holds all that is important: beyond the anchors, it takes the whole budget."""
    units = np.repeat([0, 1], 32)
    importance = np.where(units == 1, 1.0, 0.0)
    kept = select(Case(FALLING, APART, importance, 32, units=units))
    beyond = kept.indices[~kept.is_anchor]
    assert (beyond >= 32).all()
    assert len(beyond) == 22


def test_ties_go_to_the_lower_index():
    kept = select(Case(np.zeros(64), APART, FLAT, 32))
    assert kept.indices.tolist() == list(range(32))
    assert kept.is_anchor.tolist() == [True] * 8 + [False] * 24


def test_without_a_query_the_most_important_token_comes_first():
    importance = np.linspace(0.1, 1, 64)
    kept = select(Case(None, ALIKE, importance, 1))
    assert kept.indices.tolist() == [63]
    assert not kept.is_anchor.any()


def test_without_a_query_opposite_tokens_are_more_novel_than_orthogonal_ones():
    """After the first choice the distance to it counts, up to 2: nothing of the start remains."""
    features = np.array([[1.0, 0], [0, 1], [-1, 0]])
    assert select(Case(None, features, np.array([1.0, 0.6, 0.5]), 2)).indices.tolist() == [0, 2]


def test_expansion_uses_the_context_features():
    """By `features` only the last token is new, by `context_features` only the second."""
    features, context = ALIKE[:4].copy(), ALIKE[:4].copy()
    features[3] = context[1] = [1, -1, 1, -1]
    relevance = np.array([1.0, 0, 0, 0])
    assert select(Case(relevance, features, FLAT[:4], 2)).indices.tolist() == [0, 3]
    assert select(Case(relevance, features, FLAT[:4], 2, context)).indices.tolist() == [0, 1]


@example(1)
@given(st.integers(1, 40))
@settings(deadline=None, max_examples=10)
def test_a_budget_of_all_tokens_and_more_keeps_all(n):
    rng = np.random.default_rng(n)
    for budget in (n, n + 1, 10 * n):
        kept = select(Case(rng.random(n), rng.random((n, 3)), rng.random(n), budget))
        assert kept.indices.tolist() == list(range(n))

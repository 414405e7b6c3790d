# SPDX-License-Identifier: Apache-2.0
"""The published selectors against their rules in plain numpy, and what holds for all methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product, takewhile

import numpy as np
import torch

from anchorprune_vllm import PruneConfig
from anchorprune_vllm.methods import registry
from anchorprune_vllm.methods.cdpruner import cdpruner
from anchorprune_vllm.methods.controls import random_tokens, uniform_grid
from anchorprune_vllm.methods.divprune import divprune
from anchorprune_vllm.methods.fastervlm import fastervlm
from anchorprune_vllm.methods.hiprune import hiprune
from anchorprune_vllm.methods.prumerge import prumerge_plus
from anchorprune_vllm.methods.scope import scope
from anchorprune_vllm.methods.visionzip import visionzip
from anchorprune_vllm.methods.vispruner import vispruner
from anchorprune_vllm.selection import Candidates, KeptTokens, exact_cosine, kernels
from anchorprune_vllm.selection import batch as anchorprune
from tests.support.host_reads import NoHostReads
from tests.unit.selection import oracles
from tests.unit.selection.drawn import DTYPES, as_numbers, budgets, drawn

METHODS = registry.names()

# --- Against the oracles ---


def items(exact: bool, seeds: int = 18, **options: object) -> Iterator[Candidates]:
    """With all their budgets, in both dtypes."""
    for seed in range(seeds):
        item = drawn(seed, DTYPES[seed // 2 % 2], exact=exact, **options)
        for budget in budgets(item):
            yield item._replace(budget=budget)


def check_same(kept: KeptTokens, tokens: list[int]) -> None:
    assert kept.indices.tolist() == tokens
    assert kept.indices.dtype == torch.int64
    assert kept.is_anchor.tolist() == [False] * len(tokens)
    assert kept.weights is None


def check_merged(kept: KeptTokens, expected: oracles.Merged, tokens: torch.Tensor) -> None:
    """Indices, weights and the rows themselves."""
    assert kept.indices.tolist() == expected.indices
    assert kept.indices.dtype == torch.int64
    assert kept.is_anchor.tolist() == [False] * len(expected.indices)
    if kept.weights is not None:
        np.testing.assert_allclose(kept.weights.numpy(), expected.weights, rtol=1e-12)
    rows = kept.rows_of(tokens)
    assert rows.dtype == tokens.dtype
    rounding = torch.finfo(tokens.dtype).eps
    sums = expected.weights @ tokens.double().numpy()
    sizes = np.abs(expected.weights) @ tokens.double().abs().numpy()
    assert (np.abs(rows.double().numpy() - sums) <= 8 * rounding * (1 + sizes)).all()


def test_fastervlm():
    for exact in (False, True):
        for item in items(exact):
            check_same(fastervlm(item), oracles.fastervlm(as_numbers(item)))


def test_divprune():
    for exact in (False, True):
        for item in items(exact):
            check_same(divprune(item), oracles.divprune(as_numbers(item)))


def test_vispruner(subtests):
    for exact, ratio in ((False, None), (True, None), (True, 0.3), (False, 0.9)):
        options = {} if ratio is None else {"important_ratio": ratio}
        with subtests.test(exact=exact, **options):
            for item in items(exact):
                expected = oracles.vispruner(as_numbers(item), **options)
                check_same(vispruner(item, **options), expected)


def test_vispruner_of_one_kind_alone():
    for ratio in (0.0, 1.0):
        for item in items(exact=False, seeds=6):
            expected = oracles.vispruner(as_numbers(item), ratio)
            check_same(vispruner(item, important_ratio=ratio), expected)


def test_hiprune(subtests):
    for exact, alpha in ((False, None), (True, None), (False, 0.5), (True, 1.0), (False, 0.0)):
        options = {} if alpha is None else {"alpha": alpha}
        with subtests.test(exact=exact, **options):
            for item in items(exact):
                check_same(hiprune(item, **options), oracles.hiprune(as_numbers(item), **options))


def test_scope(subtests):
    for exact, alpha in ((False, 1.0), (True, 1.0), (True, 2.0), (True, 0.0), (False, 0.5)):
        with subtests.test(exact=exact, alpha=alpha):
            for item in items(exact):
                check_same(scope(item, alpha=alpha), oracles.scope(as_numbers(item), alpha))


def test_cdpruner():
    for item in items(exact=False):
        kept, factors = oracles.cdpruner(as_numbers(item))
        assert min(factors[:-1], default=1) > 1e-9  # else the rule leaves it open
        check_same(cdpruner(item), sorted(kept))


def test_cdpruner_with_fewer_directions_than_tokens():
    """Tokens that are no mixture of others are kept before all that are."""
    for item in items(exact=False, seeds=10, width=6):
        kept, factors = oracles.cdpruner(as_numbers(item))
        sure = kept[: sum(1 for _ in takewhile(lambda factor: factor > 1e-9, factors))]
        assert set(sure) <= set(cdpruner(item).indices.tolist())


def test_cdpruner_with_nearly_equal_relevance():
    """Where the 1e-6 of the released code counts: a range of 1e-6 means little."""
    for seed in range(1, 9, 2):
        item = drawn(seed)
        item = item._replace(relevance=item.relevance.double() * 1e-6, budget=10)
        kept, _ = oracles.cdpruner(as_numbers(item))
        check_same(cdpruner(item), sorted(kept)[: item.budget])


def test_visionzip(subtests):
    usual = Fraction(10, 64)
    for exact, share in (
        (False, usual),
        (True, usual),
        (True, Fraction(1, 2)),
        (False, 1),
        (True, 0),
    ):
        options = {} if share == usual else {"contextual_share": float(share)}
        with subtests.test(exact=exact, **options):
            for item in items(exact):
                expected = oracles.visionzip(as_numbers(item), Fraction(share))
                check_merged(visionzip(item, **options), expected, item.features)


def test_prumerge_plus(subtests):
    for exact, neighbours in ((False, None), (True, None), (True, 3), (False, 0)):
        options = {} if neighbours is None else {"neighbours": neighbours}
        with subtests.test(exact=exact, **options):
            for item in items(exact):
                expected = oracles.prumerge_plus(as_numbers(item), **options)
                check_merged(prumerge_plus(item, **options), expected, item.features)


# --- By hand ---


def item_of(count: int, budget: int, **signals: object) -> Candidates:
    item = drawn(1, tokens=(count, count))
    return item._replace(budget=budget, grids=((1, count),), units=None, **signals)


def test_visionzip_has_the_published_shares(subtests):
    for budget, dominant in ((64, 54), (128, 108), (192, 162), (1, 1)):
        with subtests.test(budget=budget):
            item = item_of(200, budget, importance=torch.linspace(1, 0, 200))
            kept = visionzip(item)
            assert kept.indices[:dominant].tolist() == list(range(dominant))
            assert kept.rows_of(item.features)[:dominant].equal(item.features[:dominant])
            contextual = budget - dominant
            step = (200 - dominant) // max(1, contextual)
            assert kept.indices[dominant:].tolist() == [*range(dominant, 200, step)][:contextual]


def test_visionzip_adds_the_mean_of_a_group():
    """Tokens 4 and 5 are like 3, the contextual token: what is kept is 3 and their mean."""
    keys = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1], [0, 2], [0, 3]])[:, None]
    item = item_of(6, 4, importance=torch.tensor([3.0, 2, 1, 0, 0, 0]), keys=keys)
    kept = visionzip(item, contextual_share=0.25)
    assert kept.indices.tolist() == [0, 1, 2, 3]
    assert kept.weights[3].tolist() == [0, 0, 0, 1, 0.5, 0.5]


def test_prumerge_adds_the_nearest_by_importance_and_a_row_for_the_rest():
    keys = torch.tensor([[1.0, 0], [1, 1], [0, 1], [-1, 1], [-1, 0]])[:, None]
    item = item_of(5, 3, importance=torch.tensor([0.1, 0.5, 0.05, 0.2, 0.15]), keys=keys)
    kept = prumerge_plus(item, neighbours=1)
    assert kept.indices.tolist() == [1, 0, 3]  # the most important, an even one, of the rest
    expected = torch.tensor([[0.1, 1, 0, 0, 0], [1, 0.5, 0, 0, 0], [0, 0, 0.05, 0.2, 0.15]])
    torch.testing.assert_close(kept.weights.float(), expected)


def test_hiprune_keeps_the_cross_around_an_object_within_its_unit():
    """An anchor at the end of a row: the next token is in the next row, and no neighbour."""
    attention = torch.zeros(24)
    attention[[7, 12]] = torch.tensor([2.0, 1.0])
    importance = torch.zeros(24)
    item = item_of(24, 10, importance=importance, object_attention=attention)
    item = item._replace(grids=((3, 4), (3, 4)))
    assert hiprune(item, alpha=0.5).indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 11]
    assert hiprune(item, alpha=1.0).indices.tolist() == [0, 1, 2, 3, 6, 7, 11, 12, 13, 16]


def test_hiprune_keeps_an_object_that_is_less_important_than_its_neighbours():
    attention = torch.zeros(9)
    attention[4] = 1
    importance = torch.ones(9)
    importance[4] = 0
    item = item_of(9, 4, importance=importance, object_attention=attention)
    item = item._replace(grids=((3, 3),))
    assert hiprune(item, alpha=1.0).indices.tolist() == [1, 3, 4, 5]


def test_a_unit_may_have_no_tokens(subtests):
    """A crop that is all padding has none."""
    item = item_of(24, 9)
    without = item._replace(grids=((2, 4), (4, 4)))
    for name, empty in product(("hiprune", "uniform"), ((0, 4), (0, 1), (0, 0))):
        with subtests.test(method=name, unit=empty):
            with_it = item._replace(grids=((2, 4), empty, (4, 4)))
            assert indices(name, with_it) == indices(name, without)


def test_divprune_begins_with_the_loneliest_token():
    angles = torch.deg2rad(torch.tensor([0.0, 10, 100, 110, 190, 240]))
    projected = torch.stack([angles.cos(), angles.sin()], dim=1)
    item = item_of(6, 1, projected=projected)
    assert divprune(item).indices.tolist() == [4]  # its nearest is 50 degrees away, as is that of 5
    assert divprune(item._replace(budget=2)).indices.tolist() == [1, 4]


def test_divprune_begins_with_the_loneliest_token_of_a_large_item(subtests, monkeypatch):
    """It is looked for in blocks of rows, here of 512, and may be in the first or the last."""
    for tokens, is_flipped in product((511, 512, 513, 1030), (False, True)):
        monkeypatch.setattr(exact_cosine, "_NUMBERS_AT_ONCE", 512 * tokens)
        item = drawn(2, tokens=(tokens, tokens), width=3)
        if is_flipped:
            item = item._replace(projected=item.projected.flip(0))
        distances = 1 - oracles.cosines(item.projected.double().numpy())
        np.fill_diagonal(distances, np.inf)
        loneliest = distances.min(axis=1).argmax()
        with subtests.test(tokens=tokens, is_flipped=is_flipped):
            assert divprune(item._replace(budget=1)).indices.tolist() == [loneliest]


def test_scope_counts_what_is_covered_once():
    """Three copies and one of its own: after one of the copies, the others cover nothing more."""
    context = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1]])
    item = item_of(4, 2, context_features=context, importance=torch.tensor([1.0, 2, 1, 0.1]))
    assert scope(item).indices.tolist() == [1, 3]


def test_copies_of_a_token_tie(subtests):
    """As of a still video: the same frame three times. The first of the copies is kept, wherever
    the others are in memory."""
    for width, tokens in product((11, 64, 255), (67, 70, 193)):
        generator = torch.Generator().manual_seed(6)
        vectors = torch.randn(tokens, width, generator=generator).repeat(3, 1)
        importance = torch.rand(tokens, generator=generator).repeat(3)
        item = Candidates(None, vectors, importance, min(width, tokens) // 2, projected=vectors)
        for name in ("divprune", "scope", "cdpruner"):
            with subtests.test(method=name, width=width, tokens=tokens):
                assert max(indices(name, item)) < tokens


# --- The grid ---


def test_a_uniform_grid_is_spread_evenly():
    for item in items(exact=False, seeds=40):
        chosen = set(uniform_grid(item).indices.tolist())
        assert len(chosen) == min(item.budget, len(item.importance))
        start = 0
        for rows, columns in item.grids:
            mine = [token - start for token in chosen if start <= token < start + rows * columns]
            fair = Fraction(len(chosen) * rows * columns, len(item.importance))
            assert abs(len(mine) - fair) < 1
            places = [
                sorted(t % columns for t in mine if t // columns == row) for row in range(rows)
            ]
            used = [row for row in range(rows) if places[row]]
            assert_even(used, rows)
            for row in used:
                assert_even(places[row], columns)
            in_rows = {len(places[row]) for row in used}
            assert max(in_rows, default=0) - min(in_rows, default=0) <= 1
            start += rows * columns


def assert_even(places: list[int], length: int) -> None:
    """Equal steps but for rounding, and half a step at both ends."""
    if not places:
        return
    step = length / len(places)
    steps = np.diff(places)
    assert (np.abs(steps - step) < 1).all()
    assert abs(places[0] - (step - 1) / 2) <= 1
    assert abs(length - 1 - places[-1] - (step - 1) / 2) <= 1


def test_a_uniform_grid_has_alike_steps_down_and_across(subtests):
    odd = range(1, 24, 2)
    for grid, budget, expected in (
        ((4, 4), 4, [5, 7, 13, 15]),
        ((4, 4), 1, [10]),
        ((1, 9), 3, [1, 4, 7]),
        ((9, 1), 3, [1, 4, 7]),
        ((2, 8), 4, [9, 11, 13, 15]),
        ((24, 24), 144, [24 * row + place for row in odd for place in odd]),
    ):
        with subtests.test(grid=grid, budget=budget):
            item = item_of(grid[0] * grid[1], budget)._replace(grids=(grid,))
            assert uniform_grid(item).indices.tolist() == expected


# --- Chance ---


def test_chance_follows_the_seeds_and_nothing_else():
    item = drawn(1)._replace(budget=20)
    other = drawn(1, torch.bfloat16, exact=True)._replace(budget=20)
    assert len(other.importance) == len(item.importance)
    first = random_tokens(item).indices.tolist()
    assert random_tokens(other).indices.tolist() == first
    assert random_tokens(item, seed=0).indices.tolist() == first
    assert random_tokens(item, seed=7).indices.tolist() != first
    assert random_tokens(item._replace(seed=2**63 + 5)).indices.tolist() != first
    assert random_tokens(item._replace(seed=-5), seed=-1).indices.tolist() != first


def test_chance_does_not_use_up_the_chance_of_others():
    state = torch.get_rng_state()
    random_tokens(drawn(1)._replace(budget=20))
    assert torch.get_rng_state().equal(state)


def test_chance_favours_no_place():
    item = drawn(1)._replace(budget=5)
    seen = torch.cat([random_tokens(item, seed=seed).indices for seed in range(400)])
    counts = seen.bincount(minlength=len(item.importance)).double()
    expected = 400 * 5 / len(item.importance)
    assert (counts - expected).abs().max() < 6 * expected**0.5


# --- All methods ---


def run(name: str, item: Candidates) -> KeptTokens:
    return registry.method_of(PruneConfig(8, method=name)).select([item])[0]


def indices(name: str, item: Candidates) -> list[int]:
    return run(name, item).indices.tolist()


def check_distinct(name: str, item: Candidates) -> None:
    kept = run(name, item)
    expected = min(item.budget, len(item.importance))
    tokens = kept.indices.tolist()
    assert len(tokens) == len(set(tokens)) == expected
    assert set(tokens) <= set(range(len(item.importance)))
    assert kept.is_anchor.shape == kept.indices.shape
    assert kept.rows_of(item.features).shape == (expected, item.features.shape[1])


def test_k_distinct_tokens(subtests):
    for name, exact in product(METHODS, (False, True)):
        with subtests.test(method=name, exact=exact):
            for item in items(exact, seeds=8):
                check_distinct(name, item)


def test_a_budget_of_all_tokens_and_more_keeps_all(subtests):
    for name, seed in product(METHODS, range(4)):
        item = drawn(seed)
        count = len(item.importance)
        for budget in (count, count + 1, 10 * count):
            with subtests.test(method=name, seed=seed, budget=budget):
                kept = run(name, item._replace(budget=budget))
                assert sorted(kept.indices.tolist()) == list(range(count))
                assert kept.rows_of(item.features).equal(item.features[kept.indices])


def test_one_token(subtests):
    """The smallest of all images."""
    item = drawn(1)
    alone = Candidates(*[v[:1] if isinstance(v, torch.Tensor) else v for v in item])
    for name in METHODS:
        with subtests.test(method=name):
            assert indices(name, alone._replace(budget=1, grids=((1, 1),))) == [0]


def copy_of(item: Candidates) -> Candidates:
    return Candidates(*[v.clone() if isinstance(v, torch.Tensor) else v for v in item])


def test_the_same_on_every_call_and_for_a_copy_among_others(subtests):
    item, other = drawn(1)._replace(budget=9), drawn(3)._replace(budget=5)
    copy = copy_of(item)
    for name in METHODS:
        with subtests.test(method=name):
            first = run(name, item)
            select = registry.method_of(PruneConfig(8, method=name)).select
            for kept in (run(name, item), run(name, copy), select([other, copy])[1]):
                assert kept.indices.equal(first.indices)
                assert kept.rows_of(item.features).equal(first.rows_of(item.features))


def test_inputs_stay_as_they_are(subtests):
    for name in METHODS:
        item = drawn(1, torch.float64)._replace(budget=9)
        copy = copy_of(item)
        run(name, item)
        with subtests.test(method=name):
            for one, other in zip(item, copy, strict=True):
                assert one.equal(other) if isinstance(one, torch.Tensor) else one == other


def test_only_methods_that_say_so_depend_on_the_question(subtests):
    for name in METHODS:
        if name == registry.ANCHORPRUNE:
            continue
        asks = registry.method_of(PruneConfig(8, method=name)).uses_query
        with subtests.test(method=name):
            assert asks == (name == "cdpruner")
            differ = []
            for seed in range(1, 9, 2):
                item = drawn(seed)
                asked = item._replace(budget=len(item.importance) // 2)
                unasked = asked._replace(relevance=None)
                differ.append(indices(name, asked) != indices(name, unasked))
            assert any(differ) == asks


NEEDED = {
    "anchorprune": {"importance", "features"},
    "visionzip": {"importance", "keys"},
    "divprune": {"projected"},
    "cdpruner": {"features", "projected"},
    "prumerge+": {"importance", "keys"},
    "fastervlm": {"importance"},
    "vispruner": {"importance"},
    "hiprune": {"importance", "object_attention"},
    "scope": {"importance"},
    "random": set(),
    "uniform": set(),
    "first": set(),
}


def test_signals_that_are_not_asked_for_are_not_needed(subtests):
    item = drawn(1)._replace(budget=9)
    for name in METHODS:
        needs = registry.method_of(PruneConfig(8, method=name)).needs
        unasked = {"projected", "keys", "object_attention"} - needs
        without = item._replace(**dict.fromkeys(unasked))
        if "importance" not in needs:
            without = without._replace(importance=torch.empty(0))
        if "features" not in needs:
            without = without._replace(features=item.context)
        with subtests.test(method=name):
            assert needs == NEEDED[name]
            assert indices(name, without) == indices(name, item)


SPOILT: dict[str, Callable[[Candidates], Candidates]] = {
    "constant relevance": lambda i: i._replace(relevance=torch.full_like(i.relevance, 0.3)),
    "constant importance": lambda i: i._replace(importance=torch.full_like(i.importance, 0.3)),
    "no importance": lambda i: i._replace(importance=torch.zeros_like(i.importance)),
    "zero vectors": lambda i: i._replace(
        **{name: torch.zeros_like(getattr(i, name)) for name in VECTORS}
    ),
    "all tokens alike": lambda i: i._replace(
        **{name: getattr(i, name)[:1].expand_as(getattr(i, name)) for name in VECTORS}
    ),
    "copies": lambda i: i._replace(
        **{name: getattr(i, name)[torch.arange(len(i.importance)) // 3] for name in VECTORS}
    ),
    "not a number": lambda i: i._replace(
        **{name: torch.full_like(getattr(i, name), torch.nan) for name in (*VECTORS, *SCORES)}
    ),
    "infinite scores": lambda i: i._replace(
        **{name: torch.full_like(getattr(i, name), torch.inf) for name in SCORES}
    ),
    "some not a number": lambda i: i._replace(
        **{name: getattr(i, name).masked_fill(holes(i, name), torch.nan) for name in SIGNALS}
    ),
}
VECTORS = ("features", "context_features", "projected", "keys")
SCORES = ("relevance", "importance", "object_attention")
SIGNALS = (*VECTORS, *SCORES)


def holes(item: Candidates, name: str) -> torch.Tensor:
    signal = getattr(item, name)
    return torch.rand(signal.shape, generator=torch.Generator().manual_seed(len(name))) < 0.2


def test_dull_and_bad_numbers_give_distinct_tokens(subtests):
    for kind, spoil in SPOILT.items():
        for seed in (1, 5, 7):
            item = spoil(drawn(seed))
            for name in METHODS:
                with subtests.test(kind=kind, seed=seed, method=name):
                    for budget in budgets(drawn(seed)):
                        check_distinct(name, item._replace(budget=budget))


# --- A device ---


def test_a_device_is_never_read(subtests, monkeypatch):
    for module in (anchorprune, kernels):
        monkeypatch.setattr(module, "reads_are_free", lambda tensor: False)
    for name, seed in product(METHODS, range(4)):
        item = drawn(seed)._replace(budget=30 if seed else 3)
        with subtests.test(method=name, seed=seed):
            with NoHostReads():
                kept = run(name, item)
            assert kept.indices.tolist() == indices(name, item)


def test_a_device_without_numbers_gives_the_shapes(subtests):
    """The meta device has shapes and no values: whatever depends on a value fails there."""
    for name, seed in product(METHODS, range(4)):
        item = drawn(seed)._replace(budget=30 if seed else 3)
        there = item._replace(
            **{n: getattr(item, n).to("meta") for n in SIGNALS if getattr(item, n) is not None}
        )
        expected = min(item.budget, len(item.importance))
        with subtests.test(method=name, seed=seed):
            kept = run(name, there)
            assert kept.indices.shape == kept.is_anchor.shape == (expected,)
            assert kept.indices.device.type == kept.is_anchor.device.type == "meta"
            assert kept.rows_of(there.features).shape == (expected, item.features.shape[1])

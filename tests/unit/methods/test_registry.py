# SPDX-License-Identifier: Apache-2.0
"""The registry of methods: names, options, and methods of other packages."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anchorprune_vllm import PruneConfig
from anchorprune_vllm.methods import registry
from anchorprune_vllm.selection import Candidates, KeptTokens

OURS = (
    *("anchorprune", "visionzip", "divprune", "cdpruner", "prumerge+", "fastervlm", "vispruner"),
    *("hiprune", "scope", "random", "uniform", "first"),
)


def kept(indices, weights=None):
    indices = torch.as_tensor(indices)
    return KeptTokens(indices, torch.zeros_like(indices, dtype=torch.bool), weights)


# --- Of another package ---


def tokens_from(item: Candidates, *, start: int = 0, note: str = "") -> KeptTokens:
    return kept(torch.arange(start, start + item.budget))


def means(item: Candidates) -> KeptTokens:
    tokens = len(item.features)
    return kept(torch.arange(item.budget), torch.full((item.budget, tokens), 1 / tokens))


def with_an_index_per_question(item: Candidates) -> KeptTokens:
    return kept(item.relevance.topk(item.budget).indices)


@registry.method("keys", uses_query=False)
def with_keys(item: Candidates) -> KeptTokens:
    return kept(item.keys.flatten(1).sum(1).topk(item.budget).indices)


@registry.method("keys")
def with_importance_unsaid(item: Candidates) -> KeptTokens:
    return kept(item.importance.topk(item.budget).indices)


BAD = {
    "too_few": lambda item: kept(torch.arange(item.budget - 1)),
    "too_many": lambda item: kept(torch.arange(item.budget + 1)),
    "repeated": lambda item: kept([0, 1, 1, 2, 3]),
    "out_of_range": lambda item: kept([0, 1, 2, 3, 12]),
    "negative": lambda item: kept([0, 1, 2, 3, -1]),
    "raises": lambda item: 1 // 0,
    "no_kept_tokens": lambda item: torch.arange(item.budget),
    "fractions": lambda item: kept(torch.arange(item.budget) / 2),
    "rows_missing": lambda item: kept(torch.arange(item.budget), torch.ones(4, 12)),
    "weights_of_fewer_tokens": lambda item: kept(torch.arange(item.budget), torch.ones(5, 11)),
}


@pytest.fixture
def installed(monkeypatch):
    """A package with all of these as entry points, and some that it must not have."""
    module = SimpleNamespace(
        tokens_from=tokens_from,
        means=means,
        question=with_an_index_per_question,
        keys=with_keys,
        keys_unsaid=lambda item: with_keys(item),
        importance_unsaid=with_importance_unsaid,
        **BAD,
    )
    monkeypatch.setitem(sys.modules, "other_package", module)
    names = [*vars(module), "absent", "divprune", "anchorprune"]
    points = [EntryPoint(name, f"other_package:{name}", "anchorprune.methods") for name in names]
    asked_for = []

    def entry_points(*, group):
        asked_for.append(group)
        return points

    monkeypatch.setattr(registry, "entry_points", entry_points)
    registry._installed.cache_clear()
    yield
    assert set(asked_for) <= {"anchorprune.methods"}
    registry._installed.cache_clear()


def test_names_are_ours_and_those_that_are_installed(installed):
    assert registry.names()[: len(OURS)] == OURS
    theirs = registry.names()[len(OURS) :]
    assert "tokens_from" in theirs
    assert "divprune" not in theirs  # ours stay ours
    assert "anchorprune" not in theirs


def test_ours_are_not_replaced(installed):
    config = PruneConfig(5, method="divprune")
    assert registry.method_of(config).needs == {"projected"}


def test_a_method_of_another_package_is_served_with_its_options(installed):
    config = PruneConfig(5, method="tokens_from", method_options={"start": 3})
    registry.check_method(config)
    method = registry.method_of(config)
    item = Candidates(None, torch.rand(12, 4), torch.rand(12), 4)
    found = method.select([item, item._replace(budget=2)])
    assert [k.indices.tolist() for k in found] == [[3, 4, 5, 6], [3, 4]]
    assert method.needs == {"importance", "features"}  # as it does not say
    assert method.uses_query


def test_a_method_may_merge(installed):
    registry.check_method(PruneConfig(5, method="means"))


def test_a_method_says_what_it_needs(installed):
    config = PruneConfig(5, method="keys")
    registry.check_method(config)
    assert registry.method_of(config).needs == {"keys"}
    assert not registry.method_of(config).uses_query


def test_a_method_must_say_what_it_looks_at(installed):
    for name in ("keys_unsaid", "importance_unsaid"):
        with pytest.raises(ValueError, match=f"the method {name} fails on an item"):
            registry.check_method(PruneConfig(5, method=name))


def test_a_method_that_would_end_the_engine_is_refused(installed, subtests):
    for name in BAD:
        words = f"{name} (fails on an item|returned the tokens)"
        with subtests.test(method=name), pytest.raises(ValueError, match=words):
            registry.check_method(PruneConfig(5, method=name))


def test_a_method_must_do_without_a_question(installed):
    with pytest.raises(ValueError, match="the method question fails on an item of 12 tokens"):
        registry.check_method(PruneConfig(5, method="question"))


def test_refusals_say_what_was_wrong(installed):
    with pytest.raises(ValueError, match="ZeroDivisionError: integer division") as error:
        registry.check_method(PruneConfig(5, method="raises"))
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(ValueError, match=r"\[0, 1, 1, 2, 3\].*must return 5 distinct tokens"):
        registry.check_method(PruneConfig(5, method="repeated"))
    with pytest.raises(ValueError, match="fails on an item"):
        registry.check_method(PruneConfig(5, method="absent"))


def test_options_that_do_not_work_are_refused(installed):
    config = PruneConfig(5, method="tokens_from", method_options={"start": 8})  # up to token 12
    with pytest.raises(ValueError, match=r"fails .*fix it or its options {'start': 8}"):
        registry.check_method(config)
    with pytest.raises(ValueError, match="tokens_from has no option 'begin'; it has: start, "):
        PruneConfig(5, method="tokens_from", method_options={"begin": 8})


# --- Ours ---


def test_names():
    assert registry.names()[: len(OURS)] == OURS


def test_ours_pass_the_check(subtests):
    for name in OURS:
        with subtests.test(method=name):
            registry.check_method(PruneConfig(5, method=name))


def test_options_may_be_as_small_and_as_large_as_makes_sense(subtests):
    for name, options in (
        ("visionzip", {"contextual_share": 0.0}),
        ("visionzip", {"contextual_share": 1.0}),
        ("prumerge+", {"neighbours": 1}),
        ("vispruner", {"important_ratio": 0.0}),
        ("vispruner", {"important_ratio": 1.0}),
        ("hiprune", {"alpha": 1.0}),
        ("scope", {"alpha": 0.0}),
        ("random", {"seed": -3}),
    ):
        with subtests.test(name, **options):
            registry.check_method(PruneConfig(5, method=name, method_options=options))


def test_options_of_a_wrong_kind_are_refused_at_the_start(subtests):
    for name, options in (
        ("visionzip", {"contextual_share": "half"}),
        # Small ones are harmless on the small item of the check, and not on a large one.
        ("visionzip", {"contextual_share": -0.01}),
        ("visionzip", {"contextual_share": 1.01}),
        ("prumerge+", {"neighbours": 1.5}),
        ("prumerge+", {"neighbours": 40.5}),  # more than the small item has
        ("prumerge+", {"neighbours": -1}),
        ("vispruner", {"important_ratio": -0.01}),
        ("vispruner", {"important_ratio": 1.01}),
        ("vispruner", {"important_ratio": float("nan")}),
        ("hiprune", {"alpha": -0.01}),
        ("hiprune", {"alpha": 1.01}),
        ("vispruner", {"important_ratio": None}),
        ("random", {"seed": "today"}),
    ):
        refused = pytest.raises(ValueError, match="fix it or its options")
        with subtests.test(name, **options), refused:
            registry.check_method(PruneConfig(5, method=name, method_options=options))


def test_refusals(subtests):
    for settings, words in (
        (
            {"method": "scope", "method_options": {"alhpa": 1}},
            "the method scope has no option 'alhpa' (did you mean 'alpha'?); it has: alpha",
        ),
        (
            {"method": "divprune", "method_options": {"alpha": 1}},
            "the method divprune has no option 'alpha'; it has: none",
        ),
        ({"method": "random", "method_options": {"item": 1}}, "the method random has no option"),
        ({"method_options": {"tau": 0.3}}, "method_options are for the other methods"),
        ({"method": "scope", "method_options": [1]}, "method_options must be a dictionary"),
        ({"method": "divprune", "tau": 0.3}, "tau is a setting of the method anchorprune and has"),
        ({"method": "divprune", "patience": 1}, "patience is a setting of the method anchorprune"),
        ({"method": "divprune", "min_anchor": 1}, "min_anchor is a setting of the method"),
        ({"method": "divprune", "max_anchor_ratio": 1.0}, "max_anchor_ratio is a setting of the"),
        ({"method": "divprune", "stage2": "diversity"}, "stage2 is a setting of the method"),
        ({"method": "divprune", "order": "selection"}, "order is a setting of the method"),
        ({"method": "DivPrune"}, "method must be one of anchorprune, visionzip, divprune, "),
    ):
        with subtests.test(**settings):
            with pytest.raises(ValueError) as error:  # noqa: PT011
                PruneConfig.from_dict({"budget": 8, **settings})
            assert words in str(error.value)
            assert "\n" not in str(error.value)


def test_settings_go_to_json_and_back_with_their_options():
    options = {"important_ratio": 0.25}
    config = PruneConfig(8, method="vispruner", method_options=options)
    written = json.loads(json.dumps(config.to_dict()))
    assert written["method_options"] == options
    assert PruneConfig.from_dict(written) == config
    assert PruneConfig.from_dict(PruneConfig(8).to_dict()) == PruneConfig(8)


def test_controls_look_at_nothing():
    for name in ("random", "uniform", "first"):
        method = registry.method_of(PruneConfig(5, method=name))
        assert (method.needs, method.uses_query) == (frozenset(), False), name


def test_a_method_that_asks_gets_what_words_are_compared_with():
    method = registry.method_of(PruneConfig(5, method="cdpruner"))
    assert (method.needs, method.uses_query) == ({"features", "projected"}, True)


def test_options_make_other_settings():
    """Kept tokens are cached by these."""
    prints = {
        PruneConfig(8, method=method, method_options=options).fingerprint()
        for method, options in [
            ("anchorprune", {}),
            ("scope", {}),
            ("hiprune", {}),
            ("scope", {"alpha": 0.5}),
            ("hiprune", {"alpha": 0.5}),
        ]
    }
    assert len(prints) == 5


def test_anchorprune_is_served_with_its_settings():
    """Each of them changes what it keeps."""
    chance = torch.Generator().manual_seed(3)
    item = Candidates(
        torch.rand(80, generator=chance),
        torch.randn(80, 6, generator=chance),
        torch.rand(80, generator=chance),
        40,
    )
    results = []
    for changes in (
        {},
        {"tau": 1.2},
        {"patience": 9},
        {"min_anchor": 1},
        {"max_anchor_ratio": 0.2, "patience": 99},
        {"stage2": "additive"},
        {"order": "selection"},
    ):
        (found,) = registry.method_of(PruneConfig.from_dict({"budget": 8, **changes})).select(
            [item]
        )
        results.append((*found.indices.tolist(), *found.is_anchor.tolist()))
    assert len(set(results)) == len(results)
    assert registry.method_of(PruneConfig(8)).uses_query


def test_a_method_is_imported_when_it_is_used():
    """Names, and settings without options, need no torch."""
    program = (
        "import sys; from anchorprune_vllm import PruneConfig; "
        "from anchorprune_vllm.methods import registry; registry.names(); "
        "PruneConfig(8, method='scope'); print('torch' in sys.modules); "
        "PruneConfig(8, method='scope', method_options={'alpha': 1}); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False", "True"], done.stderr

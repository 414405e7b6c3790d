# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from anchorprune_vllm.commands.bench.contenders import FREE, UNPRUNED, VLLM, Contender, contenders
from anchorprune_vllm.commands.chosen_methods import parse_methods


def test_both_controls_are_in_every_run() -> None:
    given = ("anchorprune", "divprune", "anchorprune:tau=0.1")
    found = contenders(parse_methods(given), ["5.6%", "64"])
    assert found == [
        Contender(UNPRUNED),
        *(Contender(method, "5.6%") for method in (FREE, *given)),
        *(Contender(method, "64") for method in (FREE, *given)),
    ]


def test_the_first_tokens_are_free_selection() -> None:
    assert contenders(parse_methods(["first"]), ["8"]) == [
        *(Contender(UNPRUNED), Contender(FREE, "8"))
    ]
    assert "first" not in {c.method for c in contenders(parse_methods(["all"]), ["8"])}


def test_flags() -> None:
    assert Contender(UNPRUNED).flags("clip") == []
    assert Contender(FREE, "5.6%").flags("clip") == [
        *("--anchorprune-budget", "5.6%", "--anchorprune-method", "first"),
        *("--anchorprune-text-encoder", "clip"),
    ]
    assert Contender("scope", "64").flags(feature_cache_mb=0) == [
        *("--anchorprune-budget", "64", "--anchorprune-method", "scope"),
        *("--anchorprune-config", '{"feature_cache_mb": 0}'),
    ]


def test_flags_of_a_method_with_options() -> None:
    assert Contender("scope:alpha=0.5", "64").flags(feature_cache_mb=0) == [
        *("--anchorprune-budget", "64", "--anchorprune-method", "scope"),
        *("--anchorprune-config", '{"method_options": {"alpha": 0.5}, "feature_cache_mb": 0}'),
    ]
    assert Contender("anchorprune:tau=0.1", "64").flags()[-1] == '{"tau": 0.1}'


def test_vllms_rate_is_what_it_removes() -> None:
    (own,) = [c for c in contenders([], ["5.6%"], with_vllm=True) if c.method == VLLM]
    assert own.flags() == ["--video-pruning-rate", "0.9440"]


def test_a_method_that_would_not_start() -> None:
    with pytest.raises(ValueError, match="the method scope fails on an item"):
        contenders(parse_methods(["scope:alpha=x"]), ["8"])


def test_vllms_own_pruning_knows_shares_alone() -> None:
    words = "budget 8 is a number of tokens; vLLM's video pruning knows shares alone"
    with pytest.raises(ValueError, match=words):
        contenders([], ["5%", "8"], with_vllm=True)

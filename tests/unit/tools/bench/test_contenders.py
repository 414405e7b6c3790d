# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from anchorprune_vllm.tools.bench.contenders import FREE, UNPRUNED, VLLM, Contender, contenders


def test_both_controls_are_in_every_run() -> None:
    assert contenders(["anchorprune", "divprune"], ["5.6%", "64"], with_vllm=False) == [
        Contender(UNPRUNED),
        *(Contender(method, "5.6%") for method in (FREE, "anchorprune", "divprune")),
        *(Contender(method, "64") for method in (FREE, "anchorprune", "divprune")),
    ]


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


def test_vllms_rate_is_what_it_removes() -> None:
    (own,) = [c for c in contenders([], ["5.6%"], with_vllm=True) if c.method == VLLM]
    assert own.flags() == ["--video-pruning-rate", "0.9440"]


@pytest.mark.parametrize(
    ("methods", "budgets", "with_vllm", "words"),
    [
        (["first"], ["8"], False, "method first is free selection, which takes part in every run"),
        (["nearest"], ["8"], False, "method must be one of anchorprune"),
        ([], ["5%", "8"], True, "budget 8 is a number of tokens; vLLM's video pruning knows share"),
    ],
)
def test_refusals(methods: list[str], budgets: list[str], with_vllm: bool, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        contenders(methods, budgets, with_vllm=with_vllm)

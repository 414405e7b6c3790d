# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from anchorprune_vllm import PruneConfig
from anchorprune_vllm.commands.chosen_methods import ChosenMethod
from anchorprune_vllm.commands.eval.plan import Configuration, engine_runs


def test_perfect_relevance_is_set_as_anchorprune() -> None:
    """As the first of several; on its own, and unless asked for not at all."""
    methods = [
        ChosenMethod("divprune"),
        *(ChosenMethod("anchorprune", (("tau", tau),)) for tau in (0.1, 0.3)),
    ]
    *_, ours, _, ceiling = engine_runs(methods, ["8"], ["turn"], [None], None, ceiling=True)
    assert (
        ceiling.settings
        == ours.settings
        == {
            "budget": "100%",
            "method": "anchorprune",
            "tau": 0.1,
        }
    )
    assert ceiling.configurations == (Configuration("perfect relevance", None, "turn", "8"),)
    *_, alone = engine_runs(methods[:1], ["8"], ["turn"], [None], None, ceiling=True)
    assert alone.settings == {"budget": "100%", "method": "anchorprune"}
    assert len([*engine_runs(methods, ["8"], ["turn"], [None], None)]) == 1 + 3


def test_an_engine_for_each_method_and_kind_of_positions() -> None:
    methods = [ChosenMethod("anchorprune"), ChosenMethod("anchorprune", (("tau", 0.1),))]
    first, *pruned = engine_runs(methods, ["8", "16"], ["turn", "none"], ["compact", None], "clip")
    assert first.settings is None
    assert first.configurations == (Configuration("Full"),)
    assert [engine.settings for engine in pruned] == [
        {"budget": "100%", "method": "anchorprune", "text_encoder": "clip", **more}
        for more in (
            {"positions": "compact"},
            {"positions": "compact", "tau": 0.1},
            {},
            {"tau": 0.1},
        )
    ]
    assert pruned[1].configurations == tuple(
        Configuration("anchorprune:tau=0.1", "compact", scope, budget)
        for scope in ("turn", "none")
        for budget in ("8", "16")
    )
    asked = [configuration for engine in pruned for configuration in engine.configurations]
    assert len(asked) == len({*asked}) == 16
    for engine in pruned:
        PruneConfig.from_dict(engine.settings)

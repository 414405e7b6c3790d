# SPDX-License-Identifier: Apache-2.0
"""What an evaluation runs: the configurations, and the engines that they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anchorprune_vllm.commands.chosen_methods import ChosenMethod
from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.methods import registry

FULL = "Full"
"""Stands in place of a method for the unpruned model."""
BLIND = "blind"
"""Stands in place of a method for guesses without the image."""
PERFECT = "perfect relevance"
"""Stands in place of a method for AnchorPrune when it is told where the things in question are."""


@dataclass(frozen=True)
class Configuration:
    """A line of the results; `FULL` and `BLIND` have a method only."""

    method: str
    positions: str | None = None
    query: str | None = None
    budget: str | None = None

    def __str__(self) -> str:
        query = self.query and f"query {self.query}"
        positions = self.positions and f"{self.positions} positions"
        return ", ".join(filter(None, (self.method, self.budget, query, positions)))


@dataclass(frozen=True)
class EngineRuns:
    """The settings of an engine, and the configurations that it can answer."""

    settings: dict[str, Any] | None
    """None for the unpruned model."""
    configurations: tuple[Configuration, ...]


def engine_runs(
    methods: Sequence[ChosenMethod],
    budgets: Sequence[str],
    queries: Sequence[str],
    positions: Sequence[str | None],
    text_encoder: str | None,
    ceiling: bool = False,
) -> Iterator[EngineRuns]:
    """Yield the unpruned model, then an engine for each method with each kind of positions.

    Budget and query need no engine of their own, because a request chooses them. With `ceiling`,
    AnchorPrune also runs with perfect relevance, and the options of the first AnchorPrune there is.
    """
    yield EngineRuns(None, (Configuration(FULL),))
    named = [(str(method), method) for method in methods]
    if ceiling:
        ours = (method for method in methods if method.name == registry.ANCHORPRUNE)
        named.append((PERFECT, next(ours, ChosenMethod(registry.ANCHORPRUNE))))
    for kind in positions:
        for name, method in named:
            # vLLM measures memory at start-up, so the engine's own budget is the largest.
            settings = {"budget": "100%", **method.settings()}
            if text_encoder is not None:
                settings["text_encoder"] = text_encoder
            if kind is not None:
                settings["positions"] = kind
            uses_query = registry.method_of(PruneConfig.from_dict(settings)).uses_query
            configurations = (
                Configuration(name, kind, query, budget)
                for query in (queries if uses_query else queries[:1])
                for budget in budgets
            )
            yield EngineRuns(settings, tuple(configurations))

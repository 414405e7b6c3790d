# SPDX-License-Identifier: Apache-2.0
"""What an evaluation runs: the configurations of methods, and the engines they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anchorprune_vllm.commands.chosen_methods import Method
from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.methods import registry as known

FULL = "Full"
"""In place of a method: the model without pruning."""
BLIND = "blind"
"""In place of a method: guesses without the picture."""
PERFECT = "perfect relevance"
"""In place of a method: AnchorPrune, told where the things are that a question is about."""


@dataclass(frozen=True)
class Configuration:
    """One line of the results. Fields that mean nothing for `FULL` and `BLIND` are None."""

    method: str
    positions: str | None = None
    query: str | None = None
    budget: str | None = None

    def __str__(self) -> str:
        parts = (
            self.method,
            self.budget,
            self.query and f"query {self.query}",
            self.positions and f"{self.positions} positions",
        )
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class EngineRuns:
    """What one engine is asked: its settings, and the configurations that need no other."""

    settings: dict[str, Any] | None
    """None: no pruning."""
    configurations: tuple[Configuration, ...]


def engine_runs(
    methods: Sequence[Method],
    budgets: Sequence[str],
    scopes: Sequence[str],
    positions: Sequence[str | None],
    text_encoder: str | None,
    ceiling: bool = False,
) -> Iterator[EngineRuns]:
    """The unpruned model, then an engine for each method and each kind of positions.

    Budget and query are chosen by each request. ceiling: AnchorPrune with perfect relevance too,
    set as the first AnchorPrune among the methods.
    """
    yield EngineRuns(None, (Configuration(FULL),))
    named = [(str(method), method) for method in methods]
    if ceiling:
        ours = (method for method in methods if method.name == known.ANCHORPRUNE)
        named.append((PERFECT, next(ours, Method(known.ANCHORPRUNE))))
    for place in positions:
        for name, method in named:
            # Memory is measured at start-up: for the most that a request may keep.
            settings = {"budget": "100%", **method.settings()}
            if text_encoder is not None:
                settings["text_encoder"] = text_encoder
            if place is not None:
                settings["positions"] = place
            asks = known.method_of(PruneConfig.from_dict(settings)).uses_query
            yield EngineRuns(
                settings,
                tuple(
                    Configuration(name, place, scope, budget)
                    for scope in (scopes if asks else scopes[:1])
                    for budget in budgets
                ),
            )

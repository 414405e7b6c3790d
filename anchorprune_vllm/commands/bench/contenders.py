# SPDX-License-Identifier: Apache-2.0
"""The ways to serve one model that a benchmark compares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from anchorprune_vllm import PruneConfig
from anchorprune_vllm.budget import Budget
from anchorprune_vllm.commands.chosen_methods import ChosenMethod, parse_methods
from anchorprune_vllm.methods.registry import check_method

UNPRUNED, FREE, VLLM = "unpruned", "free selection", "vLLM's video pruning"
_FREE_METHOD = "first"


@dataclass(frozen=True)
class Contender:
    """One way to serve the model."""

    method: str  # as `--methods` takes it, or one of the names above
    budget: str | None = None

    def __str__(self) -> str:
        return self.method if self.budget is None else f"{self.method}, {self.budget}"

    def flags(self, text_encoder: str | None = None, **settings: object) -> list[str]:
        """Return the flags of `vllm serve`; `settings` are further ones of `PruneConfig`."""
        if self.budget is None:
            return []
        if self.method == VLLM:
            kept = Budget.parse(self.budget).tokens(10_000) / 10_000
            return ["--video-pruning-rate", f"{1 - kept:.4f}"]
        (method,) = parse_methods([_FREE_METHOD if self.method == FREE else self.method])
        settings = {**method.settings(), **settings}
        name = str(settings.pop("method"))
        return [
            *("--anchorprune-budget", self.budget, "--anchorprune-method", name),
            *(["--anchorprune-text-encoder", text_encoder] if text_encoder else []),
            *(["--anchorprune-config", json.dumps(settings)] if settings else []),
        ]


def check_methods(methods: Sequence[ChosenMethod], budgets: Sequence[str]) -> None:
    """Raise ValueError for a method with which a server would not start."""
    for method in methods:
        check_method(PruneConfig.from_dict({"budget": budgets[0], **method.settings()}))


def contenders(
    methods: Sequence[ChosenMethod], budgets: Sequence[str], *, with_vllm: bool = False
) -> list[Contender]:
    """Return unpruned, then free selection and the methods at each budget.

    Raises ValueError for a method or budget with which a server would not start.
    """
    check_methods(methods, budgets)
    for budget in budgets:
        if with_vllm and not budget.endswith("%"):
            raise ValueError(
                f"budget {budget} is a number of tokens; vLLM's video pruning knows shares alone: "
                "give shares, as 5.6%"
            )
    others = [str(method) for method in methods if method.name != _FREE_METHOD]
    compared = [FREE, *others, *([VLLM] if with_vllm else [])]
    return [
        Contender(UNPRUNED),
        *(Contender(method, budget) for budget in budgets for method in compared),
    ]

# SPDX-License-Identifier: Apache-2.0
"""What is compared: ways to serve one model, each a server of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from anchorprune_vllm import PruneConfig
from anchorprune_vllm.budget import Budget

UNPRUNED, FREE, VLLM = "unpruned", "free selection", "vLLM's video pruning"
_FREE_METHOD = "first"


@dataclass(frozen=True)
class Contender:
    """A way to serve."""

    method: str
    """A name of `methods`, or one of the above."""
    budget: str | None = None

    def __str__(self) -> str:
        return self.method if self.budget is None else f"{self.method}, {self.budget}"

    def flags(self, text_encoder: str | None = None, **settings: object) -> list[str]:
        """Of `vllm serve`; `settings` are further ones of `PruneConfig`."""
        if self.method == UNPRUNED:
            return []
        assert self.budget is not None
        if self.method == VLLM:
            kept = Budget.parse(self.budget).tokens(10_000) / 10_000
            return ["--video-pruning-rate", f"{1 - kept:.4f}"]
        method = _FREE_METHOD if self.method == FREE else self.method
        return [
            *("--anchorprune-budget", self.budget, "--anchorprune-method", method),
            *(["--anchorprune-text-encoder", text_encoder] if text_encoder else []),
            *(["--anchorprune-config", json.dumps(settings)] if settings else []),
        ]


def contenders(
    methods: Sequence[str], budgets: Sequence[str], *, with_vllm: bool
) -> list[Contender]:
    """The two controls, and the methods at each budget; raises ValueError for unknown ones."""
    for method in methods:
        if method == _FREE_METHOD:
            raise ValueError(f"method {method} is free selection, which takes part in every run")
        PruneConfig(Budget.parse(budgets[0]), method=method)
    for budget in budgets:
        if with_vllm and not budget.endswith("%"):
            raise ValueError(
                f"budget {budget} is a number of tokens; vLLM's video pruning knows shares alone: "
                "give shares, as 5.6%"
            )
    at_budgets = [FREE, *dict.fromkeys(methods), *([VLLM] if with_vllm else [])]
    return [
        Contender(UNPRUNED),
        *(Contender(method, budget) for budget in budgets for method in at_budgets),
    ]

# SPDX-License-Identifier: Apache-2.0
"""`results.json` of `bench serve`: written after every measurement, and continued later."""

from __future__ import annotations

import statistics
from operator import attrgetter

from pydantic import BaseModel

from anchorprune_vllm.commands.bench.contenders import FREE, UNPRUNED, Contender
from anchorprune_vllm.commands.bench.load import ClientResult
from anchorprune_vllm.commands.results_file import ResumableResults


class Measurement(BaseModel):
    """One contender under one load, in one round."""

    contender: Contender
    concurrency: int
    round: int
    client: ClientResult
    kv_tokens: int  # that fit the KV cache
    embedding_seconds: float
    selection_seconds: float  # a part of the above
    memory_bytes: int  # peak of all processes; on a GPU, of what is allocated but the KV cache

    @property
    def prompt_tokens(self) -> float:
        """Tokens of a prompt, on average."""
        return self.client.total_input_tokens / self.client.completed

    @property
    def room(self) -> float:
        """Requests that fit the KV cache at once."""
        tokens = self.client.total_input_tokens + self.client.total_output_tokens
        return self.kv_tokens * self.client.completed / tokens

    @property
    def encoder_ms(self) -> float:
        """Milliseconds of a request in the vision tower, without selection."""
        return 1000 * (self.embedding_seconds - self.selection_seconds) / self.client.completed

    @property
    def selection_ms(self) -> float:
        """Milliseconds of a request in signals and selection."""
        return 1000 * self.selection_seconds / self.client.completed

    @property
    def memory_gib(self) -> float:
        """Peak memory in GiB."""
        return self.memory_bytes / 2**30


class ServeResults(ResumableResults):
    """All measurements of one output directory, which share their settings."""

    measurements: list[Measurement]

    def __contains__(self, asked: tuple[Contender, int, int]) -> bool:
        return asked in {(m.contender, m.concurrency, m.round) for m in self.measurements}

    def contenders(self) -> list[Contender]:
        """Return all that were measured: unpruned first, then by budget in order of appearance."""
        found = list(dict.fromkeys(m.contender for m in self.measurements))
        budgets = list(dict.fromkeys(contender.budget for contender in found))
        return sorted(
            found,
            key=lambda c: (c.budget is not None, budgets.index(c.budget), c.method != FREE),
        )

    def concurrencies(self) -> list[int]:
        """Return all that were measured, ascending."""
        return sorted({m.concurrency for m in self.measurements})

    def median(self, contender: Contender, concurrency: int, figure: str) -> float | None:
        """Return the median of a figure over the rounds; None: not measured.

        figure: an attribute of `Measurement`, such as "client.median_ttft_ms".
        """
        measured = [m for m in self.measurements if m.contender == contender]
        values = [attrgetter(figure)(m) for m in measured if m.concurrency == concurrency]
        return statistics.median(values) if values else None

    def speed_up(
        self, contender: Contender, concurrency: int, figure: str, over: str = UNPRUNED
    ) -> float | None:
        """Return how much faster a contender is than unpruned, or than `over` at its budget.

        A figure in milliseconds is better if it is lower, any other if it is higher.
        """
        base = Contender(over, None if over == UNPRUNED else contender.budget)
        own, other = (self.median(each, concurrency, figure) for each in (contender, base))
        if own is None or other is None:
            return None
        return other / own if figure.endswith("_ms") else own / other

# SPDX-License-Identifier: Apache-2.0
"""`results.json`: written after every measurement, and read again by the next command."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands.bench.contenders import FREE, UNPRUNED, Contender
from anchorprune_vllm.commands.results_file import check_settings, unreadable, write_json


@dataclass(frozen=True)
class Measurement:
    """One contender under one load, once."""

    contender: Contender
    concurrency: int
    round: int
    client: Mapping[str, Any]
    """Of vLLM's own result."""
    kv_tokens: int
    """For which the KV cache has room."""
    embedding_seconds: float
    selection_seconds: float
    memory_bytes: int
    """Of a CPU's server, the processes' highest; of a GPU's, what is allocated but the KV cache."""

    @property
    def prompt_tokens(self) -> float:
        """Of a request."""
        return float(self.client["total_input_tokens"]) / float(self.client["completed"])

    @property
    def room(self) -> float:
        """Requests that the KV cache can hold at once."""
        tokens = self.client["total_input_tokens"] + self.client["total_output_tokens"]
        return self.kv_tokens * float(self.client["completed"]) / float(tokens)

    @property
    def encoder_ms(self) -> float:
        """Of a request, without selection."""
        seconds = self.embedding_seconds - self.selection_seconds
        return 1000 * seconds / float(self.client["completed"])

    @property
    def selection_ms(self) -> float:
        """Of a request."""
        return 1000 * self.selection_seconds / float(self.client["completed"])

    @property
    def ttft_ms(self) -> float:
        """Median time to first token."""
        return float(self.client["median_ttft_ms"])

    @property
    def requests_per_second(self) -> float:
        return float(self.client["request_throughput"])


Figure = Callable[[Measurement], float]


class Results:
    """All measurements of one output directory; the same settings for all."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.path = directory / "results.json"
        self.settings = dict(settings)
        self.measurements: list[Measurement] = []
        self.commands: list[str] = []
        if self.path.exists():
            self._read()

    def __contains__(self, asked: tuple[Contender, int, int]) -> bool:
        return asked in {(m.contender, m.concurrency, m.round) for m in self.measurements}

    def add(self, measurement: Measurement) -> None:
        """Keep it, and write the file."""
        self.measurements.append(measurement)
        self.write()

    def contenders(self) -> list[Contender]:
        """All that were measured: unpruned first, then by budget in order of appearance."""
        found = list(dict.fromkeys(m.contender for m in self.measurements))
        budgets = list(dict.fromkeys(contender.budget for contender in found))
        return sorted(
            found,
            key=lambda c: (c.budget is not None, budgets.index(c.budget), c.method != FREE),
        )

    def concurrencies(self) -> list[int]:
        return sorted({m.concurrency for m in self.measurements})

    def median(self, contender: Contender, concurrency: int, figure: Figure) -> float | None:
        """Over the rounds; None: not measured."""
        values = [
            figure(m)
            for m in self.measurements
            if (m.contender, m.concurrency) == (contender, concurrency)
        ]
        return statistics.median(values) if values else None

    def speed_up(
        self, contender: Contender, concurrency: int, figure: Figure, *, less_is_better: bool
    ) -> float | None:
        """Against unpruned."""
        ours = self.median(contender, concurrency, figure)
        plain = self.median(Contender(UNPRUNED), concurrency, figure)
        if ours is None or plain is None:
            return None
        return plain / ours if less_is_better else ours / plain

    def of_free(
        self, contender: Contender, concurrency: int, figure: Figure, *, less_is_better: bool
    ) -> float | None:
        """Of the speed-up that free selection reaches at the same budget, the share."""
        free = Contender(FREE, contender.budget)
        ours, best = (
            self.speed_up(each, concurrency, figure, less_is_better=less_is_better)
            for each in (contender, free)
        )
        return None if ours is None or best is None else ours / best

    def write(self) -> None:
        """The file."""
        content = {
            "settings": self.settings,
            "commands": self.commands,
            "measurements": [asdict(measurement) for measurement in self.measurements],
        }
        write_json(self.path, content, indent=1)

    def _read(self) -> None:
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            found, commands = stored["settings"], stored["commands"]
            rows = [
                Measurement(**{**row, "contender": Contender(**row["contender"])})
                for row in stored["measurements"]
            ]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise unreadable(self.path, error) from error
        check_settings(self.path, found, self.settings)
        self.measurements, self.commands = rows, commands

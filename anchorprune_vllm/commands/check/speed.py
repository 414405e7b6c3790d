# SPDX-License-Identifier: Apache-2.0
"""How long choosing takes here, beside what is computed for this GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from rich.table import Table

from anchorprune_vllm.commands.bench.gpu_cost import CHOICES, Choice, cost_of
from anchorprune_vllm.commands.bench.gpus import gpu_named
from anchorprune_vllm.commands.bench.support import side_by_side
from anchorprune_vllm.commands.check.findings import Finding
from anchorprune_vllm.selection import AnchorParams, select_batch

Times = dict[str, Any]
"""One line of the table, by the names of its columns."""

_REPEATS = 5
_SLOW = 3
"""So many times the computed time is a failure: the model of the cost is wrong, or the kernel."""


def measure(device: torch.device) -> list[Times]:
    """Return for each choice of `bench gpu-cost` the milliseconds measured here, and computed."""
    choices = CHOICES if device.type == "cuda" else [c for c in CHOICES if c.tokens < 10_000]
    return [_measure(choice, device) for choice in choices]


def _measure(choice: Choice, device: torch.device) -> Times:
    items = choice.candidates(str(device))
    (measured,) = side_by_side([partial(select_batch, items, AnchorParams())], _REPEATS)
    row = {"choice": choice.model, "tokens": choice.tokens, "budget": choice.budget}
    row["measured ms"] = round(measured, 3)
    known = gpu_named(torch.cuda.get_device_name()) if device.type == "cuda" else None
    if known is not None:
        cost = cost_of(choice, known)
        row["computed ms"] = round(1e3 * max(cost.device, cost.host), 3)
        row["pruned prefill ms, computed"] = round(1e3 * cost.prefill, 1)
    return row


def speed_table(rows: list[Times]) -> Table:
    """Make the table of what was measured."""
    table = Table(title="Choosing, on this machine")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "choice" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    return table


def check_speed(device: torch.device, times: list[Times]) -> Iterator[Finding]:
    """See that choosing takes about as long as it should; what is measured joins `times`."""
    times += measure(device)
    yield _judged(times)


def _judged(rows: list[Times]) -> Finding:
    computed = [row for row in rows if "computed ms" in row]
    if not computed:
        text = "measured; nothing is computed for this device to compare it with"
        return Finding("time of choosing", "skipped", text)
    worst = max(computed, key=lambda row: row["measured ms"] / row["computed ms"])
    ratio = worst["measured ms"] / worst["computed ms"]
    text = f"at most {ratio:.1f}x of what is computed ({worst['choice']})"
    if ratio <= _SLOW:
        return Finding("time of choosing", "ok", text)
    advice = "Answers are right, but choosing is slow here. Please send the report of --json."
    return Finding("time of choosing", "FAILED", text, advice)

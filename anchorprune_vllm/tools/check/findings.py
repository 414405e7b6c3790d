# SPDX-License-Identifier: Apache-2.0
"""What a check found, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

Status = Literal["ok", "FAILED", "skipped"]
_COLOURS = {"ok": "green", "FAILED": "bold red", "skipped": "yellow"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    found: str
    """In words: what was seen, or why nothing was tried."""
    advice: str = ""
    """What to do about a failure."""


def findings_table(findings: Sequence[Finding]) -> Table:
    """Make the table that is printed at the end."""
    table = Table("check", "result", "found", title="anchorprune check")
    for finding in findings:
        colour = _COLOURS[finding.status]
        table.add_row(finding.name, f"[{colour}]{finding.status}[/{colour}]", finding.found)
    return table


def write_json(
    path: Path, machine: dict[str, str], findings: Sequence[Finding], **more: Any
) -> None:
    """Write a report that can be sent in."""
    report = {"machine": machine, "findings": [asdict(finding) for finding in findings], **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")

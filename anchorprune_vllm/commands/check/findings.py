# SPDX-License-Identifier: Apache-2.0
"""What a check found, and how it is shown."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
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
    details: str = ""
    """For the report alone: a traceback, or the end of a log."""


def guarded(name: str, part: Callable[..., Iterator[Finding]], *args: object) -> Iterator[Finding]:
    """Go through a part of the check; an error in it is a finding too, and others go on.

    A kernel that does not compile or a GPU that gives up is just what a report is for.
    """
    try:
        yield from part(*args)
    except Exception as error:
        summary = (str(error).splitlines() or [""])[0]
        yield Finding(
            name,
            "FAILED",
            f"{type(error).__name__}: {summary}",
            "Please send the report of --json; until then, leave out --anchorprune-budget.",
            traceback.format_exc(),
        )


def findings_table(findings: Sequence[Finding]) -> Table:
    """Make the table that is printed at the end."""
    table = Table("check", "result", "found", title="anchorprune check")
    for finding in findings:
        colour = _COLOURS[finding.status]
        status = f"[{colour}]{finding.status}[/{colour}]"
        table.add_row(escape(finding.name), status, escape(finding.found))
    return table


def write_json(
    path: Path, machine: dict[str, str], findings: Sequence[Finding], **more: Any
) -> None:
    """Write a report that can be sent in."""
    report = {"machine": machine, "findings": [asdict(finding) for finding in findings], **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")

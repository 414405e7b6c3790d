# SPDX-License-Identifier: Apache-2.0
"""The generated part of docs/models.md, written from the record of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from anchorprune_vllm.commands.models.listing import Row, make_rows
from anchorprune_vllm.commands.models.record import Record

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_START, _END = "<!-- architectures -->\n", "<!-- end of architectures -->\n"
_HEAD = """\
{summary}

*Stated by*: four architectures have an adapter of their own; for others, a family tells the general
adapter about the model in a few lines; for the rest, the adapter finds out when it loads the model.
*Tested* says which of the tests [above](#how-they-were-tested) an architecture has passed.

| architecture | sees | level | stated by | tested | remarks |
|---|---|---|---|---|---|
"""


def write_page(record: Record) -> None:
    """Replace the section of the page between its marks."""
    page = with_architectures(PAGE.read_text(encoding="utf-8"), record)
    PAGE.write_text(page, encoding="utf-8")


def with_architectures(page: str, record: Record) -> str:
    """Return the page with the section between its marks written from the record.

    Raises ValueError unless each mark is there once, in order.
    """
    before, start, rest = page.partition(_START)
    _, end, after = rest.partition(_END)
    if not end or (page.count(_START), page.count(_END)) != (1, 1):
        raise ValueError(f"{PAGE}: give {_START.strip()} and {_END.strip()} a line each, once")
    return f"{before}{start}{section_of(record)}{end}{after}"


def section_of(record: Record) -> str:
    """Return the summary and the table of all architectures."""
    rows = make_rows(record.architectures, record)
    lines = [
        f"| `{row.architecture}` | {row.media} | {row.level} | {row.stated_by} | {row.tested} | "
        f"{row.why.replace('|', chr(92) + '|')} |\n"
        for row in rows
    ]
    return _HEAD.format(summary=_summary(record, rows)) + "".join(lines)


def _summary(record: Record, rows: Sequence[Row]) -> str:
    tried = {trial.architecture for trial in record.trials}
    equal = {trial.architecture for trial in record.trials if trial.outcome == "equal"}
    levels = Counter(row.level for row in rows if row.architecture in equal)
    counted = ", ".join(f"{count} {level}" for level, count in sorted(levels.items()))
    return (
        f"Of {len(rows)} architectures of vLLM {record.vllm} that see images or videos, "
        f"{len(tried)} were tried with {len(record.trials)} tiny checkpoints, and {len(equal)} "
        f"passed ({counted})."
    )

# SPDX-License-Identifier: Apache-2.0
"""docs/models.md, written from the record of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from anchorprune_vllm.commands.models.listing import Row, make_rows
from anchorprune_vllm.commands.models.record import Record

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """\
# Models

Written by `make sweep`, and not by hand. `anchorprune models` shows the same table for the vLLM
that is installed.

{summary}

A tiny checkpoint with random weights says whether an architecture is served as it should be; it
says nothing about accuracy. Each was served on a CPU by a real engine, first by vLLM without a
budget and then pruned, with one image, two, images with words between them, none, and a video if it
takes one, at budgets of 12, 25% and 100%. It passes if

- *counted*: each image has as many tokens in the prompt as its budget says, and the prompt is
  shorter by the rest;
- *100%*: with a budget of all tokens, answers are those of vLLM without a budget: the same tokens,
  and logprobs within 0.001;
- *warm*: an engine that has seen other questions and budgets answers like one that has forgotten
  all;
- *positions*, where they are native: kept tokens, text and answer have positions of the unpruned
  prompt.

| level | importance |
|---|---|
| full | comes from the attention of the vision tower |
| reduced | comes from the rows: which tokens of the tower make up one is not known |
| general | not tried: full or reduced, which is found out when a checkpoint is loaded |
| no | refused with a budget, for the reason given |

*Stated by*: four architectures have an adapter of their own; a family tells the general adapter
about others in a few lines; about the rest it finds out at load. *Tested*: *reference* is a
comparison of kept tokens, positions and answers with an independent pipeline of the paper on
transformers, *engine* all tests on the real engine, and *sweep* what this page describes.

To refuse all that is not full: `--anchorprune-config '{{"level": "full"}}'`.

| architecture | sees | level | stated by | tested | remarks |
|---|---|---|---|---|---|
"""


def write_page(record: Record) -> None:
    """Write the page."""
    PAGE.write_text(page_of(record), encoding="utf-8")


def page_of(record: Record) -> str:
    """Return the whole page."""
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

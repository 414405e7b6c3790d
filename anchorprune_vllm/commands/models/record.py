# SPDX-License-Identifier: Apache-2.0
"""What the sweep over tiny checkpoints found (`make sweep`), as it lies in this package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from anchorprune_vllm.commands.results_file import write_json

RECORD = Path(__file__).with_name("record.json")

Outcome = Literal["equal", "unequal", "refused", "unserved", "failed", "timed out", "begun"]
"""Whether all checks held; else what came instead of answers: this package refuses the model,
vLLM does not serve it even unpruned, or its process ended or hung. Or nothing came yet."""
Level = Literal["full", "reduced"]


@dataclass(frozen=True)
class Trial:
    """What a tiny checkpoint did in a real engine."""

    checkpoint: str
    """Its name for `anchorprune demo-model DIR --arch NAME`."""
    architecture: str
    outcome: Outcome
    level: Level | None = None
    checks: Mapping[str, bool] = field(default_factory=dict)
    """Name of a check → whether it held."""
    why: str = ""
    """What the error said, if there was one."""


@dataclass(frozen=True)
class Architecture:
    """What an architecture's class tells."""

    media: Sequence[str]
    """"image" and "video", as far as it sees them; "unknown" if its class does not tell."""
    refused: str = ""
    """Why it cannot be pruned, where that is known of all its checkpoints."""
    untried: str = ""
    """Why there is no trial of it."""


@dataclass(frozen=True)
class Record:
    """The results of a sweep."""

    vllm: str
    """The version of vLLM that it ran on."""
    architectures: Mapping[str, Architecture]
    """All of vLLM's multimodal registry, and of this package."""
    trials: Sequence[Trial]
    references: Sequence[str] = ()
    """The architectures that tests compare with an independent reference."""


def read_record(path: Path = RECORD) -> Record:
    """Read what `write_record` has written."""
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Record(
        vllm=read["vllm"],
        architectures={
            name: Architecture(**architecture)
            for name, architecture in read["architectures"].items()
        },
        trials=[Trial(**trial) for trial in read["trials"]],
        references=read["references"],
    )


def write_record(record: Record, path: Path = RECORD) -> None:
    """Write a record; the same results give the same bytes."""
    write_json(path, asdict(record), indent=1, sort_keys=True)

# SPDX-License-Identifier: Apache-2.0
"""The results of the sweep over tiny checkpoints (`make sweep`), which come with this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from anchorprune_vllm.commands.results_file import write_json

RECORD = Path(__file__).with_name("record.json")

Outcome = Literal["equal", "unequal", "refused", "unserved", "failed", "timed out", "begun"]
"""What became of a trial. `equal`, `unequal`: whether all checks held. `refused`: this package
refuses the model. `unserved`: vLLM does not serve it, even unpruned. `failed`, `timed out`: its
process ended or hung. `begun`: nothing is known yet."""
TrialLevel = Literal["full", "reduced"]


@dataclass(frozen=True)
class Trial:
    """How a tiny checkpoint behaved in a real engine."""

    checkpoint: str
    """Its name for `anchorprune demo-model DIR --arch NAME`."""
    architecture: str
    outcome: Outcome
    level: TrialLevel | None = None
    checks: Mapping[str, bool] = field(default_factory=dict)
    """Whether each check held, by its name."""
    why: str = ""
    """The message of the error, if there was one."""


@dataclass(frozen=True)
class Architecture:
    """What the class of an architecture tells about it."""

    media: Sequence[str]
    """`image`, `video` or both; `unknown` if the class does not tell, nothing if it takes none."""
    refused: str = ""
    """Why no checkpoint of this architecture can be pruned, if that is so."""
    untried: str = ""
    """Why there is no trial of it."""


@dataclass(frozen=True)
class Record:
    """The results of a sweep."""

    vllm: str
    """The version of vLLM that was used."""
    architectures: Mapping[str, Architecture]
    """All in vLLM's multimodal registry, and those of this package."""
    trials: Sequence[Trial]
    references: Sequence[str] = ()
    """The architectures that tests compare with an independent reference."""


_RECORD_TYPE = TypeAdapter(Record)


def read_record(path: Path = RECORD) -> Record:
    """Read what `write_record` has written."""
    return _RECORD_TYPE.validate_json(path.read_bytes())


def write_record(record: Record, path: Path = RECORD) -> None:
    """Write a record; the same results give the same bytes."""
    write_json(path, _RECORD_TYPE.dump_python(record, mode="json"), indent=1, sort_keys=True)

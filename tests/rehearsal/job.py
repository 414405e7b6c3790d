# SPDX-License-Identifier: Apache-2.0
"""What one process of a rehearsal is to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Engine:
    """An engine, and what it is asked."""

    name: str
    steps: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    """Ours, beside the budget."""
    options: dict[str, Any] = field(default_factory=dict)
    """vLLM's, in place of those of all engines."""


@dataclass(frozen=True)
class Job:
    """The engines of one process, which live one after the other."""

    model: str
    engines: list[Engine]
    in_own_process: bool = False
    """Whether each engine has a process beside this one, as in a server."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the process's environment on simulated CUDA; on the CPU platform they are not set."""

    def to_text(self) -> str:
        """The job as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Job:
        """Read what `to_text` has written."""
        read = json.loads(text)
        return cls(**{**read, "engines": [Engine(**engine) for engine in read["engines"]]})

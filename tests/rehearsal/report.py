# SPDX-License-Identifier: Apache-2.0
"""What one engine answered and did, as it travels from its process to the tests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Metrics = dict[str, float]


@dataclass
class Answer:
    """A greedy answer."""

    tokens: list[int]
    logprobs: list[float]
    """Of each token."""

    @classmethod
    def of(cls, output: Any) -> Answer:
        """Take it from what vLLM returns."""
        (given,) = output.outputs
        logprobs = [
            step[token].logprob for token, step in zip(given.token_ids, given.logprobs, strict=True)
        ]
        return cls(list(given.token_ids), logprobs)


@dataclass
class HostWait:
    """One place in the code where the host waited for the device."""

    kind: str
    what: str
    is_ours: bool
    """Whether the innermost line is ours; if not, vLLM's."""
    in_encoder: bool
    """Whether it happened within `embed_multimodal`."""
    where: str
    """"file:function" of that line."""
    line: str
    times: int = 0


@dataclass
class EngineReport:
    """All that is compared or checked of one engine."""

    platform: str
    worker: str
    runner: str
    device: str
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """Of each step."""
    waits: list[HostWait] = field(default_factory=list)
    """While requests ran."""
    metrics: list[Metrics] = field(default_factory=list)
    """Our figures before and after the last request."""
    preemptions: int = 0
    kernels: list[str] = field(default_factory=list)
    """What Triton would have compiled of ours until the engine was ready."""
    late_kernels: list[str] = field(default_factory=list)
    """What it would have compiled while requests ran."""


Reports = dict[str, EngineReport]


def write_reports(reports: Reports, path: Path) -> None:
    """Write the reports of one process, by engine."""
    path.write_text(json.dumps({name: asdict(report) for name, report in reports.items()}))


def read_reports(path: Path) -> Reports:
    """Read what `write_reports` has written."""
    reports = {}
    for name, read in json.loads(path.read_text()).items():
        report = EngineReport(**read)
        report.answers = {
            step: [Answer(**answer) for answer in answers]
            for step, answers in read["answers"].items()
        }
        report.waits = [HostWait(**wait) for wait in read["waits"]]
        reports[name] = report
    return reports

# SPDX-License-Identifier: Apache-2.0
"""Processes of a rehearsal, each run once, and the table of what ran."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.server import tail
from tests.rehearsal.job import Job
from tests.rehearsal.report import Reports, read_reports
from tests.simcuda.environment import with_simulated_cuda

Stage = Literal["cpu", "V1", "V2"]
"""vLLM's CPU platform, or simulated CUDA with one of the runners."""
Rehearse = Callable[[Job, Stage], Reports]

ROOT = Path(__file__).parents[2]
ROW = "rehearsal"
COLUMNS = ("model", "media", "runner", "positions", "answers equal", "waits in encoder", "others")
_MINUTES = 20  # after which a process counts as hung


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.rehearsal)


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """arch -> directory of a model; Qwen2.5-VL's images are smaller than in the other tests."""

    @cache
    def make(arch: str) -> Path:
        model = tmp_path_factory.mktemp("small") / "model"
        make_demo_model(model, arch=arch, image_size=84 if arch == "qwen2.5-vl" else 168)
        return model

    return make


@pytest.fixture(scope="session")
def rehearse(tmp_path_factory: pytest.TempPathFactory) -> Rehearse:
    """Run a job in a process of its own, once, and return what it reported."""

    @cache  # failures too: a process that hangs does so once
    def run(job_text: str, stage: Stage) -> Reports | str:
        folder = tmp_path_factory.mktemp("rehearsal")
        (folder / "job.json").write_text(job_text)
        log, report = folder / "log", folder / "report.json"
        variables = Job.of_text(job_text).variables
        program = ("-m", "tests.rehearsal.program", str(folder / "job.json"), str(report))
        try:
            with log.open("wb") as file:
                subprocess.run(
                    [sys.executable, *program],
                    env=environment_of(stage) | (variables if stage != "cpu" else {}),
                    cwd=ROOT,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=60 * _MINUTES,
                    check=True,
                )
        except subprocess.SubprocessError as error:
            return f"{error}; the end of {log}:\n{tail(log, 60)}"
        return read_reports(report)

    def run_once(job: Job, stage: Stage) -> Reports:
        outcome = run(job.to_text(), stage)
        assert not isinstance(outcome, str), outcome
        return outcome

    return run_once


def environment_of(stage: Stage) -> dict[str, str]:
    """The variables of a process on a stage."""
    if stage == "cpu":
        return {**os.environ, "TRITON_INTERPRET": "0"}  # pytest's own process interprets
    return {
        **os.environ,
        **with_simulated_cuda(),
        "VLLM_USE_V2_MODEL_RUNNER": str(int(stage == "V2")),
        "VLLM_GPU_SYNC_CHECK": "error",
    }


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the rows that tests have recorded as a property."""
    reports = (report for group in terminalreporter.stats.values() for report in group)
    rows = [
        value
        for report in reports
        for name, value in getattr(report, "user_properties", [])
        if name == ROW and report.when == "call"
    ]
    if rows:
        terminalreporter.section("rehearsed on simulated CUDA")
        for line in as_table([COLUMNS, *sorted(rows)]):
            terminalreporter.write_line(line)


def as_table(rows: Iterable[Iterable[str]]) -> list[str]:
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]

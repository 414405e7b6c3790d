# SPDX-License-Identifier: Apache-2.0
"""Measure time and memory, and show the results as tables."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile


def this_device() -> torch.device:
    """Return the GPU that vLLM would use, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> str:
    """Describe the hardware of this machine."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return f"{len(os.sched_getaffinity(0))} cores, {found[1] if found else platform.machine()}"


def table(
    title: str, columns: Sequence[str], rows: Iterable[Iterable[object]], *, text_columns: int = 1
) -> Table:
    """Make a table: the first columns hold text, and the others right-aligned numbers."""
    made = Table(title=title)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < text_columns else "right")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def time_in_turns(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median milliseconds of each run.

    The runs take turns, so that whatever slows the machine down affects all of them alike.
    """
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for run, spent in zip(runs, times, strict=True):
            start = _now()
            run()
            if turn:  # the first turn warms up
                spent.append(1000 * (_now() - start))
    return [statistics.median(spent) for spent in times]


class StageClock:
    """Add up the seconds spent in each stage, without the stages that it calls.

    The clock waits for the device around every stage: work counts for the stage that launched it.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._nested = [0.0]  # seconds spent in the stages called by each running stage

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Time a block, or a function that this decorates, as part of a stage."""
        start = _now()
        self._nested.append(0.0)
        try:
            yield
        finally:
            spent = _now() - start
            self._seconds[stage] += spent - self._nested.pop()
            self._nested[-1] += spent

    def take(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call of this method."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes(call: Callable[[], object]) -> int:
    """Return how far the memory allocated by torch rises during a call."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    # There is no such counter for the CPU, but torch's profiler sees every allocation.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    with NamedTemporaryFile(suffix=".json") as trace:
        profiled.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    in_order = sorted(changes, key=lambda event: event["ts"])
    return max(accumulate(event["args"]["Bytes"] for event in in_order))


def resident_peak_bytes(call: Callable[[], object]) -> int:
    """Return how far the memory of this process rises during a call, including numba's arrays."""
    if torch.cuda.is_available():
        return peak_bytes(call)
    ctypes.CDLL(None).malloc_trim(0)  # freed memory must go back to Linux, or it is reused unseen
    Path("/proc/self/clear_refs").write_text("5")  # reset the recorded peak
    before = _process_bytes("VmRSS")
    call()
    return _process_bytes("VmHWM") - before


def _process_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

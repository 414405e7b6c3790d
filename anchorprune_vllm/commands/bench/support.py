# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks measure with."""

from __future__ import annotations

import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def side_by_side(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median milliseconds of each, taken in turns so that noise hits all alike."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for run, spent in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:  # the first warms up
                spent.append(1000 * (time.perf_counter() - start))
    return [statistics.median(spent) for spent in times]


def peak_bytes(call: Callable[[], object]) -> int:
    """How far torch's memory rises above its present level during a call."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    # A CPU has no such counter, but torch's profiler sees every allocation.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    with NamedTemporaryFile(suffix=".json") as trace:
        profiled.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    in_order = sorted(changes, key=lambda event: event["ts"])
    return max(accumulate(event["args"]["Bytes"] for event in in_order))


def resident_peak_bytes(call: Callable[[], object]) -> int:
    """How far the memory of this process rises during a call: what is not torch's, too."""
    if torch.cuda.is_available():
        return peak_bytes(call)
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed, but not given back, would be reused
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before = _process_bytes("VmRSS")
    call()
    return _process_bytes("VmHWM") - before


def _process_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def edit_json(path: Path, **changes: Any) -> None:
    """Change a JSON file; dictionaries in it are added to."""
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))

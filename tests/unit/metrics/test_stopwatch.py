# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from anchorprune_vllm.metrics import stopwatch
from anchorprune_vllm.metrics.stopwatch import Stopwatch

CPU = torch.device("cpu")


def test_it_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: now))
    watch = Stopwatch()
    assert watch.read() == (0.0, 0)
    for items in (2, 3):
        with watch.timing(items, CPU):
            now += 0.25
        now += 8  # outside: not counted
    assert watch.read() == (0.5, 5)


def test_work_that_fails_does_not_count() -> None:
    watch = Stopwatch()
    with pytest.raises(ZeroDivisionError), watch.timing(1, CPU):
        _ = 1 // 0
    assert watch.read() == (0.0, 0)


class Event:
    """As torch.cuda.Event: time is what the device has done so far."""

    device_ms = 0.0
    done_up_to = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.device_ms

    def query(self) -> bool:
        return self.at <= Event.done_up_to

    def elapsed_time(self, end: Event) -> float:
        assert end.query()  # otherwise it would raise
        return end.at - self.at


def test_on_cuda_events_are_read_when_the_device_has_come_past_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch, device = Stopwatch(), torch.device("cuda")
    with watch.timing(1, device):
        Event.device_ms += 30
    with watch.timing(2, device):
        Event.device_ms += 20
    assert watch.read() == (0.0, 0)  # queued, not done
    Event.done_up_to = 30
    assert watch.read() == (pytest.approx(0.03), 1)
    Event.done_up_to = 50
    assert watch.read() == (pytest.approx(0.05), 3)

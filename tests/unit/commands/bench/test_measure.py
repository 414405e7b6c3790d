# SPDX-License-Identifier: Apache-2.0
"""The clocks and the meters of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from anchorprune_vllm.commands.bench import measure
from anchorprune_vllm.commands.bench.measure import StageClock, peak_bytes, resident_peak_bytes


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list, to be set."""
    time = [100.0]
    monkeypatch.setattr(measure, "_now", lambda: time[0])
    return time


def test_what_a_stage_calls_counts_for_the_one_that_is_called(now: list[float]) -> None:
    clock = StageClock()

    def work(seconds: float) -> float:
        now[0] += seconds
        return seconds

    inner = clock.timing("inner")(work)

    def both() -> float:
        now[0] += 1
        return inner(2) + inner(seconds=4) + work(8)

    with clock.timing("outer"):
        assert clock.timing("middle")(both)() == 14
        now[0] += 16
    assert clock.take() == {"inner": 6, "middle": 9, "outer": 16}
    assert clock.take() == {}


def test_work_that_fails_counts_too(now: list[float]) -> None:
    clock = StageClock()

    def fail() -> None:
        now[0] += 1
        raise KeyError

    with clock.timing("outer"), pytest.raises(KeyError):
        clock.timing("inner")(fail)()
    assert clock.take() == {"inner": 1, "outer": 0}


def test_times_are_medians_taken_in_turns(now: list[float]) -> None:
    def take(name: str, seconds: Iterator[int]) -> None:
        turns.append(name)
        now[0] += next(seconds)

    turns: list[str] = []
    one, other = iter([100, 1, 9, 2]), iter([100, 3, 3, 7])  # the first of each is not counted
    runs = [lambda: take("a", one), lambda: take("b", other)]
    assert measure.time_in_turns(runs, repeats=3) == [2000.0, 3000.0]
    assert "".join(turns) == "abababab"


def test_the_peak_is_the_highest_level_of_memory() -> None:
    def call() -> None:
        first = torch.zeros(2**18, device=measure.this_device())  # 1 MiB
        second = first + 1
        del first
        torch.zeros(2**17, device=measure.this_device())
        del second

    assert peak_bytes(call) == pytest.approx(2 * 2**20, rel=1e-3)


def test_memory_of_the_whole_process_is_the_peak_above_what_was_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = {"VmRSS": 700, "VmHWM": 700}
    monkeypatch.setattr(measure, "_process_bytes", process.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resident_peak_bytes(lambda: process.update(VmRSS=720, VmHWM=950)) == 250


def test_memory_of_the_whole_process_is_what_linux_says() -> None:
    assert 0 < measure._process_bytes("VmRSS") <= measure._process_bytes("VmHWM")

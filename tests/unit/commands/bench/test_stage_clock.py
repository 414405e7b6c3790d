# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from anchorprune_vllm.commands.bench import stage_clock
from anchorprune_vllm.commands.bench.stage_clock import StageClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list, to be set."""
    time = [100.0]
    monkeypatch.setattr(stage_clock, "_now", lambda: time[0])
    return time


def test_what_a_stage_calls_counts_for_the_one_that_is_called(now: list[float]) -> None:
    clock = StageClock()

    def work(seconds: float) -> float:
        now[0] += seconds
        return seconds

    inner = clock.timed(work, "inner")

    def both() -> float:
        now[0] += 1
        return inner(2) + inner(seconds=4) + work(8)

    with clock.timing("outer"):
        assert clock.timed(both, "middle")() == 14
        now[0] += 16
    assert clock.take() == {"inner": 6, "middle": 9, "outer": 16}
    assert clock.take() == {}


def test_work_that_fails_counts_too(now: list[float]) -> None:
    clock = StageClock()

    def fail() -> None:
        now[0] += 1
        raise KeyError

    with clock.timing("outer"), pytest.raises(KeyError):
        clock.timed(fail, "inner")()
    assert clock.take() == {"inner": 1, "outer": 0}

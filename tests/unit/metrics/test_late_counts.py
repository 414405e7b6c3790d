# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from anchorprune_vllm.metrics import late_counts
from anchorprune_vllm.metrics.late_counts import LateCounts
from tests.support.host_reads import NoHostReads


def masks(*sizes: int) -> list[Tensor]:
    return [torch.arange(9) < size for size in sizes]


def test_on_a_cpu_they_are_there() -> None:
    counts = LateCounts()
    assert list(counts.put(masks(3, 0))) == [3, 0]
    assert list(counts.put(masks())) == []
    assert list(counts.put(masks(9))) == [9]


class Copy:
    """As torch.cuda.Event: done when the device has come so far."""

    device_is_at = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def query(self) -> bool:
        return self.number <= Copy.device_is_at


def test_on_a_device_they_come_later_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Copy] = []

    def start_copy(counts: Tensor) -> tuple[Copy, Tensor]:
        copies.append(Copy(len(copies) + 1))
        return copies[-1], counts.clone()

    monkeypatch.setattr(late_counts, "reads_are_free", lambda tensor: False)
    monkeypatch.setattr(late_counts, "_start_copy", start_copy)
    counts = LateCounts()

    def put(sizes: Sequence[int], done: int) -> list[int]:
        Copy.device_is_at = done
        given = masks(*sizes)
        with NoHostReads():
            return list(counts.put(given))

    assert put([1, 2], done=0) == []
    assert put([3], done=0) == []
    assert put([4], done=1) == [1, 2]
    assert put([], done=3) == [3, 4]
    assert put([5], done=4) == [5]
    assert len(copies) == 4


def test_devices_without_events_are_not_counted() -> None:
    counts = LateCounts()
    assert list(counts.put([torch.ones(3, dtype=torch.bool, device="meta")])) == []
    assert list(counts.put([])) == []

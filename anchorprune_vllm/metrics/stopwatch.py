# SPDX-License-Identifier: Apache-2.0
"""A stopwatch for a part of the work that never waits for a device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the seconds spent on a part of the work, and its items.

    On CUDA it measures the time of the device: events are recorded around the work and read once
    the device has passed them. Elsewhere it measures the time of the host.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._items = 0
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    @contextmanager
    def timing(self, items: int, device: torch.device) -> Iterator[None]:
        """Measure the work in this context, on `items` items; work that fails does not count."""
        stop = self._start(items, device)
        yield
        stop()

    def read(self) -> tuple[float, int]:
        """Return the seconds and items of all finished work."""
        while self._running and self._running[0][1].query():
            start, end, items = self._running.popleft()
            self._add(start.elapsed_time(end) / 1000, items)
        return self._seconds, self._items

    def _start(self, items: int, device: torch.device) -> Callable[[], None]:
        if device.type != "cuda":
            begun = time.perf_counter()
            return lambda: self._add(time.perf_counter() - begun, items)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()

        def stop() -> None:
            end.record()
            self._running.append((start, end, items))
            self.read()  # finished measurements would otherwise accumulate

        return stop

    def _add(self, seconds: float, items: int) -> None:
        self._seconds += seconds
        self._items += items

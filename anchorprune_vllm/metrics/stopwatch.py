# SPDX-License-Identifier: Apache-2.0
"""Time spent on a part of the work, added up. It never waits for a device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up seconds and items.

    On CUDA it is the device's own time: events are put around the work, and read when the device
    has come past them. Elsewhere it is the time that the host spends.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._items = 0
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    @contextmanager
    def timing(self, items: int, device: torch.device) -> Iterator[None]:
        """Work on so many items on a device; work that fails does not count."""
        stop = self._start(items, device)
        yield
        stop()

    def read(self) -> tuple[float, int]:
        """Seconds and items of all work that is done."""
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
            self.read()  # so that those that are done do not pile up

        return stop

    def _add(self, seconds: float, items: int) -> None:
        self._seconds += seconds
        self._items += items

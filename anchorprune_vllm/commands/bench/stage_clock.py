# SPDX-License-Identifier: Apache-2.0
"""Where time goes, stage by stage, when one stage calls another."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch


class StageClock:
    """Adds up the seconds of each stage; what a stage calls counts for the one that is called.

    It waits for the device around every stage: what a stage has launched is its own time.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._within = [0.0]  # seconds of the stages within each stage that runs

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Count the work as that stage's."""
        start = _now()
        self._within.append(0.0)
        try:
            yield
        finally:
            spent = _now() - start
            self._seconds[stage] += spent - self._within.pop()
            self._within[-1] += spent

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """The same function as that stage."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.timing(stage):
                return function(*args, **kwargs)

        return run

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call of this."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()

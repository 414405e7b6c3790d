# SPDX-License-Identifier: Apache-2.0
"""Run work in a process of its own, which may die or hang, and keep what it told until then."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

Told = TypeVar("Told")


class Work(NamedTuple, Generic[Told]):
    """The outcome of work in a process of its own."""

    told: Told | None
    """What it told last."""
    ending: Literal["ended", "failed", "timed out"]
    why: str
    """The reason, if it did not end as it should."""


def run_in_process(
    work: Callable[..., Iterator[Told]],
    *args: Any,
    log: Path,
    time_limit: float,
    listen: Callable[[Told], None] = lambda told: None,
) -> Work[Told]:
    """Run a generator to its end, at most `time_limit` seconds, and return what became of it.

    `listen` is called with all that it yields; what it prints goes to the file `log`.
    """
    # A fork need not import vLLM again, which would take longer than many a piece of work.
    processes = multiprocessing.get_context("fork")
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=_tell, args=(work, args, theirs, log))
    process.start()
    theirs.close()
    deadline = time.monotonic() + time_limit
    told: Told | None = None
    try:
        # A process that died may have left others that keep its end of the pipe open.
        while ready := wait([ours, process.sentinel], max(0, deadline - time.monotonic())):
            if ours not in ready:
                break
            try:
                message = ours.recv()
            except EOFError:
                break
            if not message:
                return Work(told, "ended", "")
            (told,) = message
            listen(told)
        process.join(max(0, deadline - time.monotonic()))
        if process.is_alive():
            return Work(told, "timed out", f"no result after {time_limit:.0f} s")
        return Work(told, "failed", f"its process ended with {process.exitcode}")
    finally:
        # What has ended may wait for processes that it started: all of them are ended.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        ours.close()


def _tell(work: Callable[..., Iterator[Any]], args: Any, pipe: Connection, log: Path) -> None:
    """Send all that the work yields, each in a tuple, and an empty one at its end."""
    os.setsid()  # what it starts can be ended with it
    with log.open("w", encoding="utf-8") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    with pipe:
        for told in work(*args):
            pipe.send((told,))
        pipe.send(())

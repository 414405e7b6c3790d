# SPDX-License-Identifier: Apache-2.0
"""What made the host wait for the device, and who did it."""

from __future__ import annotations

import ctypes
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any

_Listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
_library: Any = None  # the compiled device, once torch has loaded


@dataclass(frozen=True)
class Wait:
    """One wait of the host."""

    kind: str
    """read, copy, silent or synchronize: see `device/waits.h`."""
    what: str
    stack: tuple[FrameSummary, ...]
    """Outermost call first."""


@contextmanager
def recorded_waits() -> Iterator[list[Wait]]:
    """Record the waits of all threads while entered."""
    waits: list[Wait] = []

    def listen(kind: bytes, what: bytes) -> None:
        stack = traceback.extract_stack(sys._getframe(1))
        waits.append(Wait(kind.decode(), what.decode(), tuple(stack)))

    listener = _Listener(listen)
    _library.simcuda_listen(listener)
    try:
        yield waits
    finally:
        _library.simcuda_listen(None)


def listen_through(library: Any) -> None:
    """Use the compiled device from now on."""
    global _library
    _library = library

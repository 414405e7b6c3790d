# SPDX-License-Identifier: Apache-2.0
"""What Triton kernels do, counted while the interpreter runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock


@dataclass
class Work:
    """All that the programs of one kernel did, in one or more launches."""

    launches: int = 0
    operations: int = 0  # of products, whole tiles
    read_bytes: int = 0
    multiplying: set[tuple[int, ...]] = field(default_factory=set)  # launch and program


def work_of(function: Callable[..., Any], *args: Any) -> dict[str, Work]:
    """Call a function, and return what each kernel did that it launched.

    For `triton_interpreter.interpreted`: it runs where kernels are interpreted.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    done: dict[str, Work] = {}
    running: list[Work] = []
    launch, dot = GridExecutor.__call__, InterpreterBuilder.create_dot
    load = InterpreterBuilder.create_masked_load

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = done.setdefault(self.fn.__name__, Work())
        work.launches += 1
        running[:] = [work]
        return launch(self, *args, **kwargs)

    def multiplied(self: Any, one: Any, two: Any, *rest: Any) -> Any:
        work = running[0]
        rows, depth = one.data.shape
        work.operations += 2 * rows * depth * two.data.shape[1]
        work.multiplying.add((work.launches, *self.grid_idx))
        return dot(self, one, two, *rest)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        found = load(self, pointers, mask, *rest)
        running[0].read_bytes += int(mask.data.sum()) * found.data.itemsize
        return found

    with (
        mock.patch.object(GridExecutor, "__call__", launched),
        mock.patch.object(InterpreterBuilder, "create_dot", multiplied),
        mock.patch.object(InterpreterBuilder, "create_masked_load", loaded),
    ):
        function(*args)
    return done

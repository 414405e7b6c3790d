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
    programs: set[tuple[int, ...]] = field(default_factory=set)  # launch and place in it
    places: set[tuple[int, int, int]] = field(default_factory=set)  # launch, address and bytes

    @property
    def memory_bytes(self) -> int:
        """Of all that was read or written, once in each launch."""
        return sum(size for _, _, size in self.places)


def work_of(function: Callable[..., Any], *args: Any) -> dict[str, Work]:
    """Call a function, and return what each kernel did that it launched.

    For `triton_interpreter.interpreted`: it runs where kernels are interpreted.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    done: dict[str, Work] = {}
    running: list[Work] = []
    launch, dot = GridExecutor.__call__, InterpreterBuilder.create_dot
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = done.setdefault(self.fn.__name__, Work())
        work.launches += 1
        running[:] = [work]
        return launch(self, *args, **kwargs)

    def multiplied(self: Any, one: Any, two: Any, *rest: Any) -> Any:
        work = running[0]
        rows, depth = one.data.shape
        work.operations += 2 * rows * depth * two.data.shape[1]
        return dot(self, one, two, *rest)

    def touched(pointers: Any, mask: Any, size: int) -> None:
        work = running[0]
        addresses = pointers.data[mask.data.astype(bool)].tolist()
        work.places.update((work.launches, address, size) for address in addresses)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        found = load(self, pointers, mask, *rest)
        running[0].read_bytes += int(mask.data.sum()) * found.data.itemsize
        touched(pointers, mask, found.data.itemsize)
        return found

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        touched(pointers, mask, value.data.itemsize)
        running[0].programs.add((running[0].launches, *self.grid_idx))
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(GridExecutor, "__call__", launched),
        mock.patch.object(InterpreterBuilder, "create_dot", multiplied),
        mock.patch.object(InterpreterBuilder, "create_masked_load", loaded),
        mock.patch.object(InterpreterBuilder, "create_masked_store", stored),
    ):
        function(*args)
    return done

# SPDX-License-Identifier: Apache-2.0
"""What the host may do: ask a device without waiting for it, and use all of its own cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

_TASKS = Path("/proc/self/task")
_Result = TypeVar("_Result")


def in_parallel(function: Callable[..., _Result], *arguments: Sequence[Any]) -> list[_Result]:
    """`map`, on as many threads as torch has; for functions that let go of the interpreter."""
    if len(arguments[0]) == 1 or torch.get_num_threads() == 1:
        return list(map(function, *arguments))
    return list(_threads(torch.get_num_threads()).map(function, *arguments))


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "anchorprune", initializer=_use_all_cores)


def _use_all_cores() -> None:
    """Let a thread run on the cores of all threads of this process.

    vLLM binds a CPU worker's threads to a core each, and the main thread hands on its own.
    """
    if _TASKS.exists():
        tasks = [int(task.name) for task in _TASKS.iterdir()]
        os.sched_setaffinity(0, set().union(*map(os.sched_getaffinity, tasks)))


def reads_are_free(tensor: Tensor) -> bool:
    """Whether the host may read values: on a CPU they are there, on a device it would wait."""
    return tensor.device.type == "cpu"


def to_device(
    numbers: Sequence[int] | Sequence[Sequence[int]] | Tensor, device: torch.device
) -> Tensor:
    """Return numbers on a device without waiting for it; those that are there stay as they are."""
    if isinstance(numbers, Tensor) and not reads_are_free(numbers):
        return numbers.to(device)
    # vLLM loads models with the device as torch's default: "cpu" has to be said.
    staged = torch.as_tensor(numbers, device="cpu")
    if device.type == "cuda":
        # A copy from pageable memory waits, and a view that repeats elements cannot be pinned.
        staged = staged.contiguous().pin_memory()
    return staged.to(device, non_blocking=True)

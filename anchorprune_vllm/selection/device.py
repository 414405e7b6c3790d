# SPDX-License-Identifier: Apache-2.0
"""Helpers for the host: move data without waiting for a device, and use all CPU cores."""

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
    """Map a function that releases the GIL over arguments, on as many threads as torch has."""
    if len(arguments[0]) == 1 or torch.get_num_threads() == 1:
        return list(map(function, *arguments))
    return list(_threads(torch.get_num_threads()).map(function, *arguments))


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "anchorprune", initializer=_use_all_cores)


def _use_all_cores() -> None:
    """Let a thread run on the cores of all threads of this process.

    vLLM binds each thread of a CPU worker to one core, and new threads inherit the binding of the
    main thread.
    """
    if _TASKS.exists():
        tasks = [int(task.name) for task in _TASKS.iterdir()]
        os.sched_setaffinity(0, set().union(*map(os.sched_getaffinity, tasks)))


def reads_are_free(tensor: Tensor) -> bool:
    """Return whether the host can read values without waiting for a device."""
    return tensor.device.type == "cpu"


def to_device(
    numbers: Sequence[int] | Sequence[Sequence[int]] | Tensor, device: torch.device
) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for it; no copy if it is there."""
    if isinstance(numbers, Tensor) and not reads_are_free(numbers):
        return numbers.to(device)
    # While vLLM loads a model, torch's default is the device, so "cpu" has to be given.
    staged = torch.as_tensor(numbers, device="cpu")
    if device.type == "cuda":
        # A copy from pageable memory would wait, and an expanded view cannot be pinned.
        staged = staged.contiguous().pin_memory()
    return staged.to(device, non_blocking=True)

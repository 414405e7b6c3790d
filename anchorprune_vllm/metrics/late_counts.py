# SPDX-License-Identifier: Apache-2.0
"""Counts that are computed on a device and read when they arrive, so that the host never waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anchorprune_vllm.selection.device import reads_are_free


class LateCounts:
    """Counts the true elements of masks, and returns counts in the order of the masks."""

    def __init__(self) -> None:
        self._coming: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def put(self, masks: Sequence[Tensor]) -> Iterator[int]:
        """Take masks [K] on one device, and yield all counts that have arrived by now.

        On CUDA, the counts of a call arrive during a later call.
        """
        if masks:
            counts = torch.stack([mask.sum() for mask in masks])
            if reads_are_free(counts):
                yield from counts.tolist()
            elif (copy := _start_copy(counts)) is not None:
                self._coming.append(copy)
        while self._coming and self._coming[0][0].query():
            yield from self._coming.popleft()[1].tolist()


def _start_copy(counts: Tensor) -> tuple[torch.cuda.Event, Tensor] | None:
    """Start a copy to the host, and return the event that marks its end, and the copy.

    Returns None for devices other than CUDA, which have no such event; nothing is counted there.
    """
    if not counts.is_cuda:
        return None
    copy = torch.empty_like(counts, device="cpu", pin_memory=True)
    copy.copy_(counts, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return done, copy

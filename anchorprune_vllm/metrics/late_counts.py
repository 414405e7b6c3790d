# SPDX-License-Identifier: Apache-2.0
"""Counts that are made on a device, and read when they have come: the host never waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anchorprune_vllm.selection.device import reads_are_free


class LateCounts:
    """How many elements of masks are true, in the order in which the masks were given."""

    def __init__(self) -> None:
        self._coming: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def put(self, masks: Sequence[Tensor]) -> Iterator[int]:
        """Take masks [K] of one device; give the counts of these and earlier ones that are there.

        On CUDA those of the latest call are there at the earliest in the next one.
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
    """What will tell that a copy is in the host's memory, and the copy.

    None for devices other than CUDA's: nothing there tells it, so they are not counted.
    """
    if not counts.is_cuda:
        return None
    copy = torch.empty_like(counts, device="cpu", pin_memory=True)
    copy.copy_(counts, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return done, copy

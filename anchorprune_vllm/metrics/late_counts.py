# SPDX-License-Identifier: Apache-2.0
"""Counts that are made on a device, and read when they have come: the host never waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anchorprune_vllm.selection.host import reads_are_free


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
            elif counts.is_cuda:
                self._coming.append(_copied(counts))
            # On other devices there is no telling when a copy is done: they are not counted.
        while self._coming and self._coming[0][0].query():
            yield from self._coming.popleft()[1].tolist()


def _copied(counts: Tensor) -> tuple[torch.cuda.Event, Tensor]:
    """A copy on its way to the host's memory, and what happens when it is there."""
    copy = torch.empty_like(counts, device="cpu", pin_memory=True)
    copy.copy_(counts, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return done, copy

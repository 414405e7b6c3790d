# SPDX-License-Identifier: Apache-2.0
"""What the host and a device may ask of each other without either waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reads_are_free(tensor: Tensor) -> bool:
    """Whether the host may read values: on a CPU they are there, on a device it would wait."""
    return tensor.device.type == "cpu"


def to_device(
    numbers: Sequence[int] | Sequence[Sequence[int]] | Tensor, device: torch.device
) -> Tensor:
    """Numbers that the host knows, on a device; pinned, as a copy from pageable memory waits."""
    staged = torch.as_tensor(numbers)
    if device.type == "cuda":
        staged = staged.pin_memory()
    return staged.to(device, non_blocking=True)

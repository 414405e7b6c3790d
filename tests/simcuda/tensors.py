# SPDX-License-Identifier: Apache-2.0
"""Small device tensors for the tests."""

from __future__ import annotations

import torch

from tests.simcuda.waits import Wait


def on_device(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values on the device, brought there without a wait."""
    return torch.tensor(values, dtype=dtype).pin_memory().to("cuda", non_blocking=True)


def kinds(waits: list[Wait]) -> list[str]:
    """What kinds of waits there were, in order."""
    return [wait.kind for wait in waits]

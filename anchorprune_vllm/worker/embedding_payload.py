# SPDX-License-Identifier: Apache-2.0
"""Whole numbers that ride on embeddings as extra channels, exact in every dtype.

vLLM hands embeddings on as one tensor per item: what must stay with a row goes into channels behind
it. bfloat16 counts exactly up to 256 only, so a number is written in base 256.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BASE = 256


def append_numbers(rows: Tensor, numbers: Tensor, digits: int) -> Tensor:
    """Rows [R, H] with numbers [R, C], each from 0 to 256 ** digits - 1, behind them.

    Returns [R, H + C * digits].
    """
    powers = _BASE ** torch.arange(digits, device=numbers.device)
    written = numbers[:, :, None] // powers % _BASE
    return torch.cat([rows, written.flatten(1).to(rows.dtype)], dim=1)


def split_numbers(rows: Tensor, count: int, digits: int) -> tuple[Tensor, Tensor]:
    """The opposite: rows as they were, a view, and their numbers, int64 [R, C]."""
    rows, written = rows.tensor_split([rows.shape[1] - count * digits], dim=1)
    powers = _BASE ** torch.arange(digits, device=rows.device)
    return rows, (written.long().unflatten(1, (count, digits)) * powers).sum(2)

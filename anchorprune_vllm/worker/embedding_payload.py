# SPDX-License-Identifier: Apache-2.0
"""Attach whole numbers to embeddings as extra channels, exactly in every dtype.

vLLM passes embeddings on as one tensor per item, so whatever must stay with a row travels in
additional channels behind it. bfloat16 represents whole numbers exactly only up to 256, so each
number is written as digits in base 256.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BASE = 256


def append_numbers(rows: Tensor, numbers: Tensor, digits: int) -> Tensor:
    """Return rows [R, H] with numbers [R, C] appended, as [R, H + C * digits].

    Each number is from 0 to 256 ** digits - 1.
    """
    powers = _BASE ** torch.arange(digits, device=numbers.device)
    written = numbers[:, :, None] // powers % _BASE
    return torch.cat([rows, written.flatten(1).to(rows.dtype)], dim=1)


def split_numbers(rows: Tensor, count: int, digits: int) -> tuple[Tensor, Tensor]:
    """Undo `append_numbers`: return a view of the rows [R, H], and the numbers as int64 [R, C]."""
    rows, written = rows.tensor_split([rows.shape[1] - count * digits], dim=1)
    powers = _BASE ** torch.arange(digits, device=rows.device)
    return rows, (written.long().unflatten(1, (count, digits)) * powers).sum(2)

# SPDX-License-Identifier: Apache-2.0
"""Distances that are exact on a CPU: equal tokens tie, and no kernel or batch changes a choice.

A float sum depends on the order of its terms, and matrix kernels choose that order by shape, by the
place of a row and by machine. Two copies of a token may thus differ in the last bit, and an argmax
over them may pick either one. Here the entries of unit vectors are rounded to multiples of 2^-24
and multiplied in float64. A product is then a multiple of 2^-48, and every partial sum of a dot
product, at most 1 in size (Cauchy-Schwarz), fits in the 53 bits of a float64: nothing is ever
rounded, in any order. The cosine is off by some 3e-8, less than with a float32 product. Multiples
of 2^-24 up to 1 are float32 numbers too, so a kernel may store float32 and needs float64 only to
accumulate.

A rounded row u is not exactly of length 1, so 1 - uu is not exactly 0, and a token would be some
1e-8 away from its copy. Hence the distance is |u - v|^2 / 2 = |u|^2 / 2 + |v|^2 / 2 - uv. For
length 1 that is 1 - cos; it is exact as well, and 0 only for copies.

Products use `torch.baddbmm`. Exact products need none of the kernels with which vLLM replaces mm,
bmm, matmul and others under VLLM_BATCH_INVARIANT, and these do not support float64.

On a GPU, float64 would cost up to 64 times as much, so the same is computed in float32 there. A
choice between tokens whose scores differ by less than 1e-5 may then go either way; by less than
1e-3, if vLLM is told to round what it multiplies (`VLLM_FLOAT32_MATMUL_PRECISION`), which
AnchorPrune's own kernels ignore.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = 2.0**24

MAX_DISTANCE = 2.0
"""The largest possible cosine distance."""

_NUMBERS_AT_ONCE = 2**22  # 32 MiB of float64


def working_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that selection computes in: float64 on the CPU, float32 on a device."""
    return torch.float64 if device.type == "cpu" else torch.float32


def unit_rows(features: Tensor) -> Tensor:
    """Return rows [..., D] scaled to length 1; on the CPU, entries are multiples of 2^-24.

    A row without a direction (zero, or not finite) becomes zero: its cosine with everything is 0.
    The features may have any float dtype; the result is a new tensor in the working dtype.
    """
    rows = features.to(working_dtype(features.device), copy=True)
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    rows.div_(norms).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return rows.mul_(GRID).round_().mul_(1 / GRID) if rows.dtype == torch.float64 else rows


def half_squares(rows: Tensor) -> Tensor:
    """Return |u|^2 / 2 for each row u of `unit_rows` [..., D]; 1/2 for rows without a direction."""
    halves = torch.linalg.vecdot(rows, rows).mul_(0.5)
    return halves.masked_fill_(halves == 0, 0.5)


def products(rows: Tensor, others: Tensor) -> Tensor:
    """Return the dot products [N, M] of `unit_rows` [N, D] and [M, D]; exact on the CPU."""
    nothing = rows.new_zeros(1, 1, 1)
    return torch.baddbmm(nothing, rows[None], others.mT[None], beta=0)[0]


def distances(rows: Tensor, others: Tensor) -> Tensor:
    """Return the cosine distances [B, N, M] of `unit_rows` [B, N, D] and [B, M, D].

    They are 1 - cos, between 0 and 2, in the dtype of the rows.
    """
    if rows.dtype != torch.float64:
        return torch.baddbmm(rows.new_ones(1, 1, 1), rows, others.mT, alpha=-1)
    found = torch.baddbmm(half_squares(rows)[:, :, None], rows, others.mT, alpha=-1)
    # Opposite rows that are slightly longer than 1 would exceed the maximum.
    return found.add_(half_squares(others)[:, None]).clamp_max_(MAX_DISTANCE)


def rows_at_once(others: int) -> int:
    """Return the number of rows to compare with `others` rows at a time in bounded memory."""
    return max(1, _NUMBERS_AT_ONCE // max(1, others))

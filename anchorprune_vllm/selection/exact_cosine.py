# SPDX-License-Identifier: Apache-2.0
"""Distances that are exact on a CPU: equal tokens tie, and no kernel or batch changes a choice.

A float sum depends on the order of its terms, and matrix kernels choose that order by shape, by the
place of a row and by machine: two copies of a token differ in the last bit, and an argmax over them
picks either one. Here the entries of unit vectors are rounded to multiples of 2^-24 and multiplied
in float64. A product is then a multiple of 2^-48, and every partial sum of a dot product, at most 1
in size (Cauchy-Schwarz), fits in the 53 bits of a float64: nothing is ever rounded, in any order.
The cosine is off by some 3e-8, less than that of a float32 product. Multiples of 2^-24 up to 1 are
float32 numbers too: a kernel may store float32, and needs float64 only to accumulate.

Rounded, a row u is not quite of length 1, and 1 - uu not quite 0: a token would be some 1e-8 away
from its copy. Hence the distance is |u - v|^2 / 2 = |u|^2 / 2 + |v|^2 / 2 - uv. At length 1 that is
1 - cos; it is exact as well, and 0 for copies alone.

Products are taken with `torch.baddbmm`. What is exact in any order needs none of the kernels that
vLLM puts in the place of mm, bmm, matmul and others under VLLM_BATCH_INVARIANT, and those know no
float64.

On a GPU float64 would cost up to 64 times as much. There, the same is computed in float32: a choice
between tokens that score the same to within 1e-5 may then fall either way. Within 1e-3, where vLLM
is told to round what it multiplies (`VLLM_FLOAT32_MATMUL_PRECISION`); AnchorPrune's own kernels do
not follow that.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = 2.0**24

MAX_DISTANCE = 2.0
"""The largest cosine distance there is."""

_NUMBERS_AT_ONCE = 2**22  # 32 MiB of float64


def working_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that selection computes in: float64 on the CPU, float32 on a device."""
    return torch.float64 if device.type == "cpu" else torch.float32


def unit_rows(features: Tensor) -> Tensor:
    """Scale rows to length 1; on the CPU, entries are rounded to multiples of 2^-24.

    A row without a direction (zero, or not finite) becomes zero: its cosine with everything is 0.

    Args:
        features: [..., D], any float dtype.

    Returns:
        [..., D] in the working dtype, a new tensor.
    """
    rows = features.to(working_dtype(features.device), copy=True)
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    rows.div_(norms).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return rows.mul_(GRID).round_().mul_(1 / GRID) if rows.dtype == torch.float64 else rows


def half_squares(rows: Tensor) -> Tensor:
    """|u|^2 / 2 of rows [..., D] of `unit_rows`; 1/2 of a row without a direction."""
    halves = torch.linalg.vecdot(rows, rows).mul_(0.5)
    return halves.masked_fill_(halves == 0, 0.5)


def products(rows: Tensor, others: Tensor) -> Tensor:
    """Return the dot products of `unit_rows`: [N, D] and [M, D] to [N, M]; exact on the CPU."""
    nothing = rows.new_zeros(1, 1, 1)
    return torch.baddbmm(nothing, rows[None], others.mT[None], beta=0)[0]


def distances(rows: Tensor, others: Tensor) -> Tensor:
    """Return cosine distances 1 - cos, between 0 and 2.

    Args:
        rows: [B, N, D] of `unit_rows`.
        others: [B, M, D] of `unit_rows`.

    Returns:
        [B, N, M] in the dtype of the rows.
    """
    if rows.dtype != torch.float64:
        return torch.baddbmm(rows.new_ones(1, 1, 1), rows, others.mT, alpha=-1)
    found = torch.baddbmm(half_squares(rows)[:, :, None], rows, others.mT, alpha=-1)
    # The clamp is for opposites that are a bit longer than 1.
    return found.add_(half_squares(others)[:, None]).clamp_max_(MAX_DISTANCE)


def rows_at_once(others: int) -> int:
    """Return how many rows to compare with `others` at a time, so that memory stays bounded."""
    return max(1, _NUMBERS_AT_ONCE // max(1, others))

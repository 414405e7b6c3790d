# SPDX-License-Identifier: Apache-2.0
"""Distances that are exact: equal tokens tie, and no kernel, batch or device changes a choice.

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
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = 2.0**24

_NUMBERS_AT_ONCE = 2**22  # 32 MiB of float64


def unit_rows(features: Tensor) -> Tensor:
    """Scale rows to length 1, entries rounded to multiples of 2^-24.

    A row without a direction (zero, or not finite) becomes zero: its cosine with everything is 0.

    Args:
        features: [..., D], any float dtype.

    Returns:
        [..., D] float64, a new tensor.
    """
    rows = features.to(torch.float64, copy=True)
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    rows.div_(norms).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return rows.mul_(GRID).round_().mul_(1 / GRID)


def half_squares(rows: Tensor) -> Tensor:
    """|u|^2 / 2 of rows [..., D] of `unit_rows`; 1/2 of a row without a direction."""
    halves = torch.linalg.vecdot(rows, rows).mul_(0.5)
    return halves.masked_fill_(halves == 0, 0.5)


def products(rows: Tensor, others: Tensor) -> Tensor:
    """Return the exact dot products of `unit_rows`: [N, D] and [M, D] to [N, M] float64."""
    nothing = rows.new_zeros(1, 1, 1)
    return torch.baddbmm(nothing, rows[None], others.mT[None], beta=0)[0]


def distances(
    rows: Tensor,
    others: Tensor,
    halves: Tensor | None = None,
    other_halves: Tensor | None = None,
) -> Tensor:
    """Return cosine distances 1 - cos, between 0 and 2.

    Args:
        rows: [B, N, D] of `unit_rows`.
        others: [B, M, D] of `unit_rows`.
        halves: [B, N], `half_squares` of the rows, if they are known already.
        other_halves: [B, M], those of the others.

    Returns:
        [B, N, M] float64.
    """
    halves = half_squares(rows) if halves is None else halves
    other_halves = half_squares(others) if other_halves is None else other_halves
    found = torch.baddbmm(halves[:, :, None], rows, others.mT, alpha=-1)
    # The clamp is for opposites that are a bit longer than 1.
    return found.add_(other_halves[:, None]).clamp_max_(2)


def rows_at_once(others: int) -> int:
    """Return how many rows to compare with `others` at a time, so that memory stays bounded."""
    return max(1, _NUMBERS_AT_ONCE // max(1, others))

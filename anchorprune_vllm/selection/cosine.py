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
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = 2.0**24


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


def distances(rows: Tensor, others: Tensor) -> Tensor:
    """Cosine distances 1 - cos, between 0 and 2.

    Args:
        rows: [B, N, D] of `unit_rows`.
        others: [B, M, D] of `unit_rows`.

    Returns:
        [B, N, M] float64.
    """
    return to_distances(
        torch.bmm(rows, others.mT), half_squares(rows)[:, :, None], half_squares(others)[:, None]
    )


def to_distances(products: Tensor, halves: Tensor, other_halves: Tensor) -> Tensor:
    """Distances of dot products, in place; the clamp is for opposites a bit longer than 1."""
    return products.neg_().add_(halves).add_(other_halves).clamp_max_(2)

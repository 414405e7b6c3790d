# SPDX-License-Identifier: Apache-2.0
"""Cosines that are exact, so that equal tokens tie and no kernel, batch or device changes a choice.

A float sum depends on the order of its terms, and matrix kernels choose that order by shape, by the
place of a row and by machine: two copies of a token differ in the last bit, and an argmax over them
picks either one. Here the entries of unit vectors are rounded to multiples of 2^-24 and multiplied
in float64. A product is then a multiple of 2^-48, and every partial sum of a dot product, at most 1
in size (Cauchy-Schwarz), fits in the 53 bits of a float64: nothing is ever rounded, in any order.
The cosine is off by some 3e-8, less than that of a float32 product. Multiples of 2^-24 up to 1 are
float32 numbers too: a kernel may store float32, and needs float64 only to accumulate.
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


def distances(rows: Tensor, others: Tensor) -> Tensor:
    """Cosine distances 1 - cos, between 0 and 2.

    Args:
        rows: [B, N, D] of `unit_rows`.
        others: [B, M, D] of `unit_rows`.

    Returns:
        [B, N, M] float64.
    """
    return to_distances(torch.bmm(rows, others.mT))


def to_distances(cosines: Tensor) -> Tensor:
    """1 - cos, in place; the clamp removes the 1e-8 by which rounded vectors are longer than 1."""
    return cosines.neg_().add_(1).clamp_(0, 2)

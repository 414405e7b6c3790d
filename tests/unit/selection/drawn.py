# SPDX-License-Identifier: Apache-2.0
"""Items with all signals, for the methods and, as the same numbers, for their oracles."""

from __future__ import annotations

import numpy as np
import torch

from anchorprune_vllm.selection import Candidates
from tests.unit.selection.oracles import Tokens

DTYPES = [torch.float32, torch.bfloat16]


def drawn(
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    exact: bool = False,
    tokens: tuple[int, int] = (5, 80),
    width: int = 90,
) -> Candidates:
    """An item of a size in the range `tokens`, with a query if the seed is odd.

    Every third item is one unit, the others are several grids. `exact`: vectors of which many are
    equal or zero and whose cosines are exact, and scores of which many are equal.
    """
    rng = np.random.default_rng(seed)
    grids: list[tuple[int, int]] = []
    while not tokens[0] <= sum(rows * columns for rows, columns in grids) <= tokens[1]:
        units = 1 if seed % 3 == 0 else rng.integers(2, 5)
        side = int((2 * tokens[1] / units) ** 0.5)
        grids = [(int(r), int(c)) for r, c in rng.integers(1, 1 + side, size=(units, 2))]
    count = sum(rows * columns for rows, columns in grids)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(dtype)

    def scores() -> torch.Tensor:
        if exact:
            return tensor(rng.integers(0, rng.choice([1, 3, 9]), size=count) / 8)
        return tensor(rng.random(count))

    def vectors(width: int) -> torch.Tensor:
        return tensor(exact_vectors(rng, count) if exact else rng.standard_normal((count, width)))

    heads = 1 if exact else 3
    return Candidates(
        relevance=scores() - 0.5 if seed % 2 else None,
        features=vectors(7),
        importance=scores(),
        budget=0,
        context_features=vectors(9),
        units=torch.repeat_interleave(torch.tensor([rows * columns for rows, columns in grids])),
        projected=vectors(width),
        keys=vectors(heads * 5).view(count, heads, -1),
        object_attention=scores(),
        grids=tuple(grids),
        seed=seed,
    )


def exact_vectors(rng: np.random.Generator, count: int) -> np.ndarray:
    """Rows of -1, 0, 1 with 0, 1, 4 or 16 of them not 0: their lengths and cosines are exact."""
    variety = rng.integers(1, count + 1)
    pool = np.zeros((variety, 18))
    for row in pool:
        places = rng.permutation(18)[: rng.choice([0, 1, 4, 4, 16, 16])]
        row[places] = rng.choice([-1.0, 1.0], size=len(places))
    return pool[rng.integers(0, variety, size=count)]


def budgets(item: Candidates) -> list[int]:
    """The smallest, the largest, and some between."""
    count = len(item.importance)
    few, some = 1 + (item.seed * 7) % count, 1 + (item.seed * 31 + count // 2) % count
    return sorted({1, 2, few, some, count // 2, count - 1, count})


def as_numbers(item: Candidates) -> Tokens:
    def array(tensor: torch.Tensor | None) -> np.ndarray | None:
        return None if tensor is None else tensor.double().numpy()

    return Tokens(
        relevance=array(item.relevance),
        features=array(item.features),
        importance=array(item.importance),
        budget=item.budget,
        context=array(item.context),
        projected=array(item.projected),
        keys=array(item.keys),
        object_attention=array(item.object_attention),
        grids=tuple(item.grids),
    )

# SPDX-License-Identifier: Apache-2.0
"""Selection on device tensors, without an engine: the CPU's tokens, and no wait of the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anchorprune_vllm import PruneConfig
from anchorprune_vllm.commands.check.kernels import random_item, regret
from anchorprune_vllm.methods.registry import method_of, names
from anchorprune_vllm.selection import AnchorParams, Candidates, select_batch
from tests.simcuda.waits import recorded_waits

GRIDS = {"an image": ((6, 8),), "frames": ((4, 4), (4, 4), (4, 4))}
LARGEST_REGRET = 1e-5


def draw(grids: tuple[tuple[int, int], ...], seed: int, *, has_question: bool) -> Candidates:
    """An item whose tokens have all signals there are."""
    noise = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([rows * columns for rows, columns in grids])
    tokens = int(sizes.sum())

    def some(*shape: int) -> Tensor:
        return torch.rand(tokens, *shape, generator=noise)

    return Candidates(
        relevance=some() if has_question else None,
        features=some(16),
        importance=some(),
        budget=12,
        context_features=some(24),
        units=torch.arange(len(grids)).repeat_interleave(sizes),
        projected=some(16),
        keys=some(2, 8),
        object_attention=some(),
        grids=grids,
        seed=seed,
    )


def on_the_device(item: Candidates) -> Candidates:
    """The same item, but for `units`, which the host reads."""
    moved = {
        name: value.cuda()
        for name, value in item._asdict().items()
        if isinstance(value, Tensor) and name != "units"
    }
    return item._replace(**moved)


@pytest.mark.parametrize("has_question", [True, False])
@pytest.mark.parametrize("grids", GRIDS)
@pytest.mark.parametrize("name", names())
def test_method(name: str, grids: str, has_question: bool) -> None:
    method = method_of(PruneConfig(budget=12, method=name))
    items = [draw(GRIDS[grids], seed, has_question=has_question) for seed in range(2)]
    expected = method.select(items)
    moved = [on_the_device(item) for item in items]
    with recorded_waits() as waits:
        given = method.select(moved)
        rows = [kept.rows_of(item.features) for kept, item in zip(given, moved, strict=True)]
    assert waits == []
    for kept, row, wanted, item in zip(given, rows, expected, items, strict=True):
        assert kept.indices.is_cuda
        assert kept.indices.tolist() == wanted.indices.tolist()
        assert kept.is_anchor.tolist() == wanted.is_anchor.tolist()
        torch.testing.assert_close(row.cpu(), wanted.rows_of(item.features))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (70, 9), (300, 64)])
def test_random_items(tokens: int, width: int, dtype: torch.dtype) -> None:
    """A quarter of the tokens are copies; budgets go from one token to all of them."""
    for budget in {1, (tokens + 1) // 2, tokens}:
        item = random_item(tokens, width, budget, dtype)
        moved = on_the_device(item)
        with recorded_waits() as waits:
            (kept,) = select_batch([moved], AnchorParams(order="selection"))
        assert waits == []
        chosen, anchor = kept.indices.cpu(), torch.zeros(tokens, dtype=torch.bool)
        anchor[chosen[kept.is_anchor.cpu()]] = True
        context = chosen[~kept.is_anchor.cpu()]
        in_order = torch.cat([anchor.nonzero().flatten(), context])
        assert regret(item.features, item.importance, anchor, in_order) <= LARGEST_REGRET
        (wanted,) = select_batch([item], AnchorParams())
        assert anchor.tolist() == [
            token in wanted.indices[wanted.is_anchor] for token in range(tokens)
        ]

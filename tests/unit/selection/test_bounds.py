# SPDX-License-Identifier: Apache-2.0
"""How much memory methods ask for: a bound for what they hold of pairs of tokens."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.methods.registry import method_of, names
from anchorprune_vllm.methods.scope import MOST_TOKENS
from anchorprune_vllm.selection import Candidates, batch, exact_cosine
from tests.unit.selection.drawn import drawn

# So many that pairs of one half of them with the other are more than the bound, too.
TOKENS, KEPT = 2048, 8
BOUNDED = [name for name in names() if name != "scope"]


class LargestTensor(TorchDispatchMode):
    """Remembers the most memory that one tensor took, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


@pytest.fixture
def at_a_time(monkeypatch: pytest.MonkeyPatch) -> int:
    """Products that are held at a time, few enough for several blocks of rows."""
    monkeypatch.setattr(batch, "reads_are_free", lambda tensor: False)
    monkeypatch.setattr(exact_cosine, "_NUMBERS_AT_ONCE", 64 * TOKENS)
    return 64 * TOKENS


def large_item(tokens: int = TOKENS) -> Candidates:
    item = drawn(3, tokens=(tokens, 2 * tokens), width=16)
    shorter = {
        name: value[:tokens] for name, value in item._asdict().items() if isinstance(value, Tensor)
    }
    return item._replace(**shorter, budget=KEPT, grids=((1, tokens),))


def test_no_method_holds_all_pairs_of_tokens(at_a_time: int, subtests: pytest.Subtests) -> None:
    for name in BOUNDED:
        with subtests.test(name=name):
            choose = method_of(PruneConfig(budget=KEPT, method=name)).select
            with LargestTensor() as largest:
                (kept,) = choose([large_item()])
            assert len(kept.indices) == KEPT
            assert largest.bytes <= 8 * max(at_a_time, 256 * TOKENS)  # or anchors, 256 at a time
            assert largest.bytes < 8 * TOKENS * TOKENS / 2


def test_blocks_of_rows_choose_the_same(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for name, seed in product(names(), range(6)):
        choose = method_of(PruneConfig(budget=KEPT, method=name)).select
        item = drawn(seed, exact=bool(seed % 2))._replace(budget=5)
        with subtests.test(method=name, seed=seed):
            (at_once,) = choose([item])
            with monkeypatch.context() as patch:
                patch.setattr(exact_cosine, "_NUMBERS_AT_ONCE", 3 * len(item.features))
                (in_blocks,) = choose([item])
            assert torch.equal(at_once.indices, in_blocks.indices)
            if at_once.weights is not None:
                assert torch.equal(at_once.weights, in_blocks.weights)


def test_scope_holds_each_pair_once_in_float32() -> None:
    choose = method_of(PruneConfig(budget=KEPT, method="scope")).select
    with LargestTensor() as largest:
        choose([large_item()])
    assert largest.bytes <= 8 * TOKENS * TOKENS  # a block in float64, all of them here
    assert method_of(PruneConfig(budget=KEPT, method="scope")).most_tokens == MOST_TOKENS
    assert 4 * MOST_TOKENS**2 == 2**30


@pytest.mark.usefixtures("at_a_time")
def test_scope_of_several_blocks_holds_little_more() -> None:
    choose = method_of(PruneConfig(budget=KEPT, method="scope")).select
    with LargestTensor() as largest:
        choose([large_item()])
    assert largest.bytes == 4 * TOKENS * TOKENS

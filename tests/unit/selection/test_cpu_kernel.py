# SPDX-License-Identifier: Apache-2.0
"""The CPU form of the greedy loop chooses what the plain form chooses, in the same order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anchorprune_vllm.selection.cosine import unit_rows
from anchorprune_vllm.selection.expand import Worth, greedy_expansion
from anchorprune_vllm.selection.kernels import cpu


@pytest.fixture(autouse=True, scope="module")
def small_front():
    """So that few tokens are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_SMALLEST_FRONT", 3)
        yield


def check(features: Tensor, importance: Tensor, taken: Tensor, steps: int) -> None:
    rows, novelty = unit_rows(features), torch.full((len(features),), 2.0, dtype=torch.float64)
    given = rows, importance.double(), novelty, taken
    before = [tensor.clone() for tensor in given]
    for addend in (None, importance.double().flip(0)):
        worth = Worth(given[1], addend)
        batch = Worth(given[1][None], None if addend is None else addend[None])
        plain = greedy_expansion(rows[None], batch, novelty[None], taken[None], steps)[0]
        assert cpu.lazy_expansion(rows, worth, novelty, taken, steps).tolist() == plain.tolist()
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))


@settings(deadline=None, max_examples=200)
@given(st.integers(4, 60), st.integers(0, 2**32), st.data())
def test_ties_everywhere(tokens: int, seed: int, data: st.DataObject) -> None:
    """A handful of directions and of importances: most scores are equal to others."""
    random = torch.Generator().manual_seed(seed)
    features = torch.randint(-1, 2, (tokens, 2), generator=random).float()
    importance = torch.randint(0, 3, (tokens,), generator=random) / 4
    taken = torch.rand(tokens, generator=random) < 0.2
    steps = data.draw(st.integers(0, int((~taken).sum())))
    check(features, importance, taken, steps)


@pytest.mark.parametrize(("tokens", "steps"), [(200, 1), (200, 90), (200, 200), (700, 300)])
def test_features_in_clusters(tokens: int, steps: int) -> None:
    random = torch.Generator().manual_seed(tokens + steps)
    centres = torch.randn(tokens // 5, 16, generator=random).repeat(5, 1)
    features = centres + 0.3 * torch.randn(tokens, 16, generator=random)
    importance = torch.rand(tokens, generator=random)
    check(features, importance, torch.zeros(tokens, dtype=torch.bool), steps)


@pytest.mark.parametrize("seed", range(10))
def test_negative_importance(seed: int) -> None:
    """Such a score rises as novelty falls: an old one is no bound."""
    random = torch.Generator().manual_seed(seed)
    features = torch.randn(50, 3, generator=random)
    importance = -torch.rand(50, generator=random)
    check(features, importance, torch.zeros(50, dtype=torch.bool), 30)

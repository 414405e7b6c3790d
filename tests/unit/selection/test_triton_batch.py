# SPDX-License-Identifier: Apache-2.0
"""All of a batch through both Triton kernels, interpreted, against the form of the paper."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from anchorprune_vllm.anchor_params import ORDERS, STAGES_2, AnchorParams
from anchorprune_vllm.selection import Candidates, batch, scores, select_batch
from anchorprune_vllm.selection.anchorprune import select
from anchorprune_vllm.selection.kernels import gpu, gpu_anchor
from anchorprune_vllm.selection.units import anchored_units
from tests.support.host_reads import NoHostReads
from tests.support.triton_interpreter import interpreted


def item(seed: int, sizes: tuple[int, ...], budget: int, is_asked: bool = True) -> Candidates:
    """An item with a unit for each size; its features have a few directions, so some are novel."""
    random = torch.Generator().manual_seed(seed)
    tokens = sum(sizes)
    directions = torch.randn(7, 24, generator=random)
    noise = 0.3 * torch.randn(tokens, 24, generator=random)
    return Candidates(
        torch.randn(tokens, generator=random) if is_asked else None,
        directions[torch.randint(7, (tokens,), generator=random)] + noise,
        torch.rand(tokens, generator=random),
        budget,
        context_features=torch.randn(tokens, 16, generator=random),
        units=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
    )


ITEMS = [
    item(0, (60,), 24),
    item(1, (30, 50, 20), 40),
    item(2, (45,), 12, is_asked=False),
    item(3, (9, 1), 64),  # keeps all
]


def by_triton(items: list[Candidates], params: AnchorParams) -> list[tuple[Tensor, Tensor]]:
    """Choose as on a GPU, with items on the CPU: for the process that interprets kernels."""
    with (
        mock.patch.object(batch, "reads_are_free", return_value=False),
        mock.patch.object(batch, "runs_triton", return_value=True),
        mock.patch.object(scores, "working_dtype", return_value=torch.float32),
        mock.patch.object(gpu, "compile_for"),
    ):
        return [(kept.indices, kept.is_anchor) for kept in select_batch(items, params)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stage2", STAGES_2)
def test_a_batch_keeps_what_the_paper_keeps(stage2: str, order: str) -> None:
    params = AnchorParams(stage2=stage2, order=order, tau=0.3, patience=2)
    found = interpreted(by_triton, ITEMS, params)
    for given, (indices, is_anchor) in zip(ITEMS, found, strict=True):
        wanted = select(given, params)
        assert indices.tolist() == wanted.indices.tolist()
        assert is_anchor.tolist() == wanted.is_anchor.tolist()
    assert 0 < found[1][1].sum() < 40


def test_a_batch_without_questions_has_no_anchor() -> None:
    ((indices, is_anchor),) = interpreted(by_triton, [ITEMS[2]], AnchorParams())
    assert indices.tolist() == select(ITEMS[2], AnchorParams()).indices.tolist()
    assert not is_anchor.any()


def test_ranking_waits_for_nothing() -> None:
    asked = [each for each in ITEMS if each.relevance is not None]
    units = [anchored_units(each, AnchorParams()) for each in asked]
    with NoHostReads():
        ranking = gpu_anchor.rank_units([each.relevance for each in asked], units)
    assert len(ranking.token) == sum(map(len, units))

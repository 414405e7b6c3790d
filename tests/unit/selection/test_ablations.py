# SPDX-License-Identifier: Apache-2.0
"""The paper's ablations: what Stage 2 goes by, and the order of the kept tokens."""

from __future__ import annotations

from itertools import cycle, product

import numpy as np
import pytest
import torch

from anchorprune_vllm.anchor_params import ORDERS, STAGES_2
from anchorprune_vllm.selection import (
    AnchorParams,
    Candidates,
    KeptTokens,
    anchor_prune,
    batch,
    scores,
    select_batch,
)
from tests.support.host_reads import NoHostReads
from tests.unit.selection import oracles
from tests.unit.selection.drawn import DTYPES, as_numbers, budgets, drawn


@pytest.fixture(params=["cpu", "device"])
def either_path(request, monkeypatch):
    """The way of a CPU, and that of a device without Triton."""
    if request.param == "device":
        monkeypatch.setattr(batch, "reads_are_free", lambda tensor: False)


def check(kept: KeptTokens, item: Candidates, stage2: str, order: str) -> None:
    tokens, anchors = oracles.anchorprune(as_numbers(item), stage2)
    is_anchor = [True] * anchors + [False] * (len(tokens) - anchors)
    if order == "native":
        tokens, is_anchor = map(
            list, zip(*sorted(zip(tokens, is_anchor, strict=True)), strict=True)
        )
    assert kept.indices.tolist() == tokens
    assert kept.is_anchor.tolist() == is_anchor
    assert kept.weights is None


def test_one_item(either_path, subtests):
    """Each form with drawn and with exact numbers; the orders take turns."""
    orders = cycle((*ORDERS, *reversed(ORDERS)))
    for stage2, exact in product(STAGES_2, (False, True)):
        order = next(orders)
        params = AnchorParams(stage2=stage2, order=order)
        with subtests.test(stage2=stage2, order=order, exact=exact):
            for seed in range(8):
                item = drawn(seed, DTYPES[seed // 2 % 2], exact=exact, tokens=(5, 60))
                for budget in budgets(item):
                    asked = item._replace(budget=budget)
                    check(select_batch([asked], params)[0], asked, stage2, order)


def test_a_batch(either_path, subtests):
    """With and without a query, of different sizes; the dtype of relevance is that of each item."""
    items = [drawn(seed, tokens=(5, 60))._replace(budget=3 + 4 * seed) for seed in range(6)]
    items[3] = items[3]._replace(relevance=1 + items[3].relevance.double() * 1e-12)
    for stage2, order in product(STAGES_2, ORDERS):
        params = AnchorParams(stage2=stage2, order=order)
        with subtests.test(stage2=stage2, order=order):
            for item, kept in zip(items, select_batch(items, params), strict=True):
                check(kept, item, stage2, order)


def test_an_item_of_many_tokens(either_path, subtests):
    """Enough for the CPU to look at the best of them only."""
    for stage2, seed in product(STAGES_2, (1, 2, 3)):
        item = drawn(seed, tokens=(280, 340))._replace(budget=60)
        with subtests.test(stage2=stage2, seed=seed):
            kept = select_batch([item], AnchorParams(stage2=stage2, order="selection"))[0]
            check(kept, item, stage2, "selection")


def test_the_function_has_the_options(subtests):
    item = drawn(1)._replace(budget=20)
    for stage2, order in product(STAGES_2, ORDERS):
        with subtests.test(stage2=stage2, order=order):
            check(anchor_prune(*item[:6], stage2=stage2, order=order), item, stage2, order)


def test_the_order_changes_no_token():
    item = drawn(1)._replace(budget=20)
    native = anchor_prune(*item[:6])
    chosen = anchor_prune(*item[:6], order="selection")
    assert chosen.indices.tolist() != native.indices.tolist()
    assert chosen.indices.sort().values.equal(native.indices)
    assert chosen.is_anchor[chosen.indices.argsort()].equal(native.is_anchor)


def test_all_ablations_share_the_anchor():
    item = drawn(1)._replace(budget=30)
    kept = [anchor_prune(*item[:6], stage2=stage2) for stage2 in STAGES_2]
    anchors = [k.indices[k.is_anchor].tolist() for k in kept]
    assert anchors.count(anchors[0]) == len(STAGES_2)
    assert len({tuple(k.indices.tolist()) for k in kept}) == len(STAGES_2)


# --- By hand: token 0 is the anchor; 1 is opposite, 2 at a right angle, 3 near. ---

HAND = Candidates(
    relevance=torch.tensor([1.0, 0.0, 0.3, 0.9]),
    features=torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0.8, 0.6]]),
    importance=torch.tensor([0.0, 0.1, 0.3, 0.2]),
    budget=2,
)


def test_by_hand(subtests):
    for stage2, relevance, expected in (
        ("importance", [1.0, 0.0, 0.3, 0.9], 2),  # 0.2, 0.3, 0.04
        ("diversity", [1.0, 0.0, 0.3, 0.9], 1),  # 2, 1, 0.2
        ("additive", [1.0, 0.0, 0.3, 0.9], 1),  # 2, 1.3, 1.1
        ("multiplicative", [1.0, 0.0, 0.3, 0.9], 2),  # 0, 0.3, 0.18
        ("multiplicative", [1.0, 0.0, 0.1, 0.9], 3),  # 0, 0.1, 0.18
        # Scaled to 0..1, whatever the range: as the last one.
        ("multiplicative", [0.02, 0.01, 0.011, 0.019], 3),
        ("additive", [300.0, -700.0, 299.0, 299.0], 1),  # 2, 1.999, 1.199
        ("additive", [300.0, -700.0, 300.0, 299.0], 1),  # 2, 2, 1.199: of equals the first
    ):
        with subtests.test(stage2=stage2, relevance=relevance):
            item = HAND._replace(relevance=torch.tensor(relevance, dtype=torch.float64))
            assert anchor_prune(*item[:6], stage2=stage2).indices.tolist() == [0, expected]


def test_relevance_without_a_difference_counts_the_same_for_all(subtests):
    flat = HAND._replace(relevance=torch.full((4,), 0.4))
    for stage2 in STAGES_2:
        with subtests.test(stage2=stage2):
            expected = 2 if stage2 == "importance" else 1
            assert anchor_prune(*flat[:6], stage2=stage2).indices.tolist() == [0, expected]


def test_without_a_query_only_novelty_counts(subtests):
    others = [stage2 for stage2 in STAGES_2 if stage2 != "importance"]
    for stage2, seed in product(others, range(0, 8, 2)):
        item = drawn(seed)
        item = item._replace(budget=len(item.importance) // 2)
        dull = item._replace(importance=torch.zeros_like(item.importance))
        with subtests.test(stage2=stage2, seed=seed):
            kept = anchor_prune(*item[:6], stage2=stage2)
            assert kept.indices.equal(anchor_prune(*item[:6], stage2="diversity").indices)
            assert kept.indices.equal(anchor_prune(*dull[:6], stage2=stage2).indices)


# --- Bad numbers, and a device ---


def test_bad_numbers_give_distinct_tokens(either_path, subtests):
    for bad, stage2, order in product((torch.nan, torch.inf, -torch.inf, 3e38), STAGES_2, ORDERS):
        items = []
        for share in (0.3, 1.0):
            item = drawn(1)._replace(budget=25)
            chance = torch.Generator().manual_seed(1)
            signals = [
                signal.masked_fill(torch.rand(signal.shape, generator=chance) < share, bad)
                for signal in item[:3]
            ]
            items.append(Candidates(*signals, budget=25, units=item.units))
        with subtests.test(bad=bad, stage2=stage2, order=order):
            for kept in select_batch(items, AnchorParams(stage2=stage2, order=order)):
                assert len(set(kept.indices.tolist())) == 25
                assert kept.indices.min() >= 0
                assert kept.indices.max() < len(items[0].importance)


def test_relevance_that_is_no_number_is_last_of_the_anchor():
    """As where the anchor is chosen."""
    item = drawn(1)._replace(units=None)
    item.relevance[item.relevance.topk(3).indices] = torch.nan
    all_but_one = len(item.relevance) - 1  # all of them anchor tokens
    item = item._replace(budget=all_but_one)
    params = AnchorParams(all_but_one, max_anchor_ratio=1.0, order="selection")
    kept = select_batch([item], params)[0]
    last = item._replace(relevance=item.relevance.nan_to_num(-1e30))
    assert kept.indices.tolist() == select_batch([last], params)[0].indices.tolist()


def test_a_device_is_never_read(subtests, monkeypatch):
    items = [drawn(seed)._replace(budget=9 + seed) for seed in range(4)]
    for stage2, order in product(STAGES_2, ORDERS):
        params = AnchorParams(stage2=stage2, order=order)
        alone = [select_batch([item], params)[0].indices.tolist() for item in items]
        with subtests.test(stage2=stage2, order=order), monkeypatch.context() as patch:
            patch.setattr(batch, "reads_are_free", lambda tensor: False)
            with NoHostReads():
                kept = select_batch(items, params)
            assert [k.indices.tolist() for k in kept] == alone


def test_a_device_without_numbers_gives_the_shapes(subtests):
    items = []
    for seed in range(4):
        item = drawn(seed)
        meta = {
            name: value.to("meta")
            for name, value in item._asdict().items()
            if isinstance(value, torch.Tensor) and name != "units"
        }
        items.append(item._replace(**meta, budget=9 + seed))
    for stage2, order in product(STAGES_2, ORDERS):
        params = AnchorParams(stage2=stage2, order=order)
        with subtests.test(stage2=stage2, order=order):
            for item, kept in zip(items, select_batch(items, params), strict=True):
                assert kept.indices.shape == (min(item.budget, len(item.importance)),)
                assert kept.indices.device.type == "meta"


def test_scaling_is_exact_at_its_ends():
    found = scores.scaled(torch.tensor(np.linspace(-3, 5, 7)))
    assert found[0] == 0
    assert found[-1] == 1
    assert scores.scaled(torch.full((3,), torch.nan)).tolist() == [1, 1, 1]

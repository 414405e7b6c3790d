# SPDX-License-Identifier: Apache-2.0
"""Batches, devices, dtypes and bad numbers: what must not change the result, or not raise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorprune_vllm.selection import (
    AnchorParams,
    Candidates,
    anchor_prune,
    anchor_prune_batch,
    batch,
    select_batch,
)
from tests.support.host_reads import NoHostReads

PARAMS = AnchorParams()


@pytest.fixture
def device_path(monkeypatch):
    """What runs on a device without Triton: the plain form, in which nothing is read."""
    monkeypatch.setattr(batch, "reads_are_free", lambda tensor: False)


def prune(item, **params):
    """`anchor_prune` of an item: its fields, without those of other methods."""
    return anchor_prune(*item[:6], **params)


def random_item(seed, tokens, budget, units=1, width=24, asked=True, copies=1):
    """`copies` repeats every vector, as the frames of a still video do."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        distinct = torch.randn(-(-tokens // copies), *shape, generator=generator)
        return distinct.repeat(copies, *[1] * len(shape))[:tokens]

    return Candidates(
        rand() if asked else None,
        rand(width),
        rand().abs(),
        budget,
        rand(2 * width) if seed % 2 else rand(2 * width).round(),
        torch.arange(tokens) * units // tokens if units > 1 else None,
    )


def as_lists(kept):
    return [(item.indices.tolist(), item.is_anchor.tolist()) for item in kept]


def one_by_one(items, params=PARAMS):
    return [select_batch([item], params)[0] for item in items]


ITEMS = st.lists(
    st.builds(
        random_item,
        seed=st.integers(0, 2**32),
        tokens=st.integers(1, 50),
        budget=st.integers(1, 25),
        units=st.integers(1, 6),
        asked=st.booleans(),
        copies=st.integers(1, 4),
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=40)
@given(ITEMS)
def test_a_batch_is_its_items(items):
    assert as_lists(select_batch(items, PARAMS)) == as_lists(one_by_one(items))


@settings(deadline=None, max_examples=40)
@given(ITEMS)
def test_the_way_of_a_device_gives_the_same(items):
    """Padded to one batch, with bounds instead of the numbers themselves."""
    alone = as_lists(one_by_one(items))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "reads_are_free", lambda tensor: False)
        assert as_lists(select_batch(items, PARAMS)) == alone
        assert as_lists(one_by_one(items)) == alone


def test_padding_is_never_chosen(device_path):
    """Not even where every token is worth nothing, as padding is."""
    short = Candidates(None, torch.eye(3), torch.zeros(3), 3)
    long = Candidates(None, torch.eye(9)[:, :3], torch.ones(9), 9)
    assert select_batch([short, long], PARAMS)[0].indices.tolist() == [0, 1, 2]
    fewer = [short._replace(budget=2), long]
    assert as_lists(select_batch(fewer, PARAMS)) == as_lists(one_by_one(fewer))
    assert select_batch(fewer, PARAMS)[0].indices.tolist() == [0, 1]


def test_items_on_several_threads_give_the_same():
    before = torch.get_num_threads()
    items = [random_item(seed, 50 + seed, 20, units=1 + seed % 3) for seed in range(12)]
    expected = as_lists(one_by_one(items))
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert as_lists(select_batch(items, PARAMS)) == expected
    finally:
        torch.set_num_threads(before)


def test_padding_and_threads_do_not_change_a_large_item(device_path, subtests):
    """Sizes at which matrix kernels split their work differently, and widths that divide badly."""
    for threads in (1, 2, 3):
        with subtests.test(threads=threads):
            before = torch.get_num_threads()
            alone = random_item(1, 577, 64, width=511)
            expected = as_lists(select_batch([alone], PARAMS))
            try:
                torch.set_num_threads(threads)
                for others in ([], [random_item(2, 1201, 9, width=511)], [alone, alone]):
                    assert as_lists(select_batch([*others, alone], PARAMS))[-1:] == expected
            finally:
                torch.set_num_threads(before)


def test_copies_of_a_token_tie_exactly(subtests):
    """Three still frames: wherever the copies are, only the first of them is chosen."""
    for width in (7, 64, 1023, 1024):
        with subtests.test(width=width):
            frame = random_item(5, 193, 1, width=width, asked=False)._replace(context_features=None)
            video = Candidates(
                None,
                frame.features.repeat(3, 1),
                frame.importance.repeat(3),
                budget=60,
            )
            kept = prune(video)
            assert kept.indices.max() < 193
            assert kept.indices.tolist() == prune(frame._replace(budget=60)).indices.tolist()


MIXED = [
    random_item(1, 40, 13, units=3),
    random_item(2, 70, 20, asked=False),
    random_item(3, 9, 30),
]


def test_a_device_is_never_read(device_path):
    with NoHostReads():
        kept = select_batch(MIXED, PARAMS)
    assert as_lists(kept) == as_lists(one_by_one(MIXED))


def test_reading_would_be_noticed():
    """Of one item: what other threads do is not seen."""
    with NoHostReads(), pytest.raises(AssertionError, match="reads from the device"):
        select_batch(MIXED[:1], PARAMS)


def test_a_device_without_numbers_gives_the_shapes():
    """The meta device has shapes and no values: whatever depends on a value fails there."""
    items = [
        item._replace(
            **{
                name: value.to("meta")
                for name, value in item._asdict().items()
                if isinstance(value, torch.Tensor) and name != "units"
            }
        )
        for item in MIXED
    ]
    for item, kept in zip(items, select_batch(items, PARAMS), strict=True):
        expected = min(item.budget, len(item.features))
        assert kept.indices.shape == kept.is_anchor.shape == (expected,)
        assert kept.indices.device.type == "meta"


def test_only_the_values_count_and_not_their_dtype(subtests):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        with subtests.test(dtype=dtype):
            item = random_item(4, 60, 20)
            signals = [signal.to(torch.bfloat16).to(dtype) for signal in item[:3]]
            wide = [signal.to(torch.bfloat16).double() for signal in item[:3]]
            assert as_lists([anchor_prune(*signals, 20)]) == as_lists([anchor_prune(*wide, 20)])


def test_rows_need_not_be_contiguous():
    item = random_item(4, 60, 20)
    strided = item._replace(features=item.features.T.contiguous().T, relevance=item.relevance[:])
    assert as_lists(select_batch([strided], PARAMS)) == as_lists(select_batch([item], PARAMS))


def test_inputs_stay_as_they_are():
    item = random_item(4, 60, 20, units=4)._replace(features=torch.randn(60, 24).double())
    before = [part for part in item if isinstance(part, torch.Tensor)]
    copies = [part.clone() for part in before]
    prune(item)
    assert all(torch.equal(one, other) for one, other in zip(before, copies, strict=True))


def test_results_hold_no_more_memory_than_they_need():
    kept = prune(random_item(4, 60, 20))
    assert kept.indices.untyped_storage().nbytes() == 20 * 8
    assert kept.is_anchor.untyped_storage().nbytes() == 20


def test_no_gradient_is_recorded_and_the_indices_serve_training():
    item = random_item(4, 60, 20)
    features = item.features.requires_grad_()
    kept = anchor_prune(item.relevance, features, item.importance, 20)
    features[kept.indices].sum().backward()
    assert features.grad.sum() == 20 * 24


def test_no_gradient_is_recorded_in_a_batch(monkeypatch):
    """On several threads: what is off in one of them is on in the others."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    items = [random_item(seed, 60, 20) for seed in range(3)]
    asking = [item._replace(importance=item.importance.requires_grad_()) for item in items]
    assert as_lists(anchor_prune_batch(asking)) == as_lists(map(prune, items))


def test_no_items():
    assert select_batch([], PARAMS) == []
    assert anchor_prune_batch([]) == []


def test_the_public_batch_passes_the_parameters_on():
    items = [random_item(seed, 60, 30) for seed in range(3)]
    params = {"min_anchor": 4, "tau": 0.4, "patience": 5, "max_anchor_ratio": 0.9}
    expected = [prune(item, **params) for item in items]
    assert as_lists(anchor_prune_batch(items, **params)) == as_lists(expected)
    assert as_lists(anchor_prune_batch(items)) != as_lists(expected)


@settings(deadline=None, max_examples=80)
@given(ITEMS, st.data())
def test_bad_numbers_give_distinct_tokens_and_no_error(items, data):
    spoil = st.sampled_from([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0])
    for item in items:
        for signal in item[:3]:
            if signal is None:
                continue
            share = data.draw(st.sampled_from([0, 0.3, 1]))
            where = torch.rand(signal.shape, generator=torch.Generator().manual_seed(0)) < share
            signal[where] = data.draw(spoil)
    items = [item._replace(context_features=None) for item in items]
    for item, kept in zip(items, select_batch(items, PARAMS), strict=True):
        assert len(set(kept.indices.tolist())) == min(item.budget, len(item.features))
        assert (kept.indices.diff() > 0).all()


def test_one_bad_token_does_not_spoil_the_others(subtests):
    """A row that is not finite counts as zero; a relevance that is no number ranks last."""
    for bad in (torch.nan, torch.inf, -torch.inf):
        with subtests.test(bad=bad):
            item = random_item(6, 60, 20)._replace(context_features=None)
            zero = item._replace(features=item.features.clone())
            zero.features[7] = 0
            spoilt = item._replace(features=item.features.clone())
            spoilt.features[7] = bad
            assert as_lists(select_batch([spoilt], PARAMS)) == as_lists(
                select_batch([zero], PARAMS)
            )
            item.relevance[item.relevance.argmax()] = torch.nan
            last = item._replace(relevance=item.relevance.nan_to_num(-1e30))
            assert as_lists(select_batch([item], PARAMS)) == as_lists(select_batch([last], PARAMS))


def test_importance_below_zero_counts_as_zero():
    item = random_item(6, 60, 20)
    item.importance[30:] = -item.importance[30:]
    item.importance[40] = -torch.inf
    zero = item._replace(importance=item.importance.clamp_min(0))
    assert as_lists(select_batch([item], PARAMS)) == as_lists(select_batch([zero], PARAMS))


def test_importance_without_bounds_comes_first():
    item = random_item(6, 60, 2, asked=False)
    item.importance[[20, 50]] = torch.inf
    for largest in (item.importance, item.importance.double().clamp_max(1.7e308)):
        kept = select_batch([item._replace(importance=largest)], PARAMS)[0]
        assert kept.indices.tolist() == [20, 50]


def test_importance_that_is_no_number_counts_as_zero():
    item = random_item(6, 60, 20)
    item.importance[30:] = torch.nan
    zero = item._replace(importance=item.importance.nan_to_num(0.0))
    assert as_lists(select_batch([item], PARAMS)) == as_lists(select_batch([zero], PARAMS))


def test_a_unit_of_bad_relevance_keeps_its_own_tokens():
    """Worse than all numbers, yet better than the padding behind a shorter unit."""
    item = random_item(6, 30, 12)._replace(units=torch.tensor([0] * 6 + [1] * 24))
    item.relevance[:6] = torch.nan
    kept = select_batch([item], PARAMS)[0]
    assert kept.indices[kept.is_anchor][0] == 0

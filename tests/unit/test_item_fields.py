# SPDX-License-Identifier: Apache-2.0
"""Batched arguments of a model call, taken apart and joined again as vLLM joins them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from anchorprune_vllm.item_fields import items_of, joined, slices_of


def item(rows: int, size: Sequence[int], pixels: int = 2) -> MultiModalKwargsItem:
    """An image with all kinds of fields: flat along two axes, batched (of like shapes or not)."""
    flat, across = (MultiModalFlatField(slices=(), dim=dim) for dim in (0, -1))
    each, shared = MultiModalBatchedField(), MultiModalSharedField(batch_size=3)
    return MultiModalKwargsItem(
        {
            "across": MultiModalFieldElem(data=torch.rand(2, rows), field=across),
            "flat": MultiModalFieldElem(data=torch.rand(rows, 3), field=flat),
            "list": MultiModalFieldElem(data=[torch.rand(n) for n in range(rows)], field=flat),
            "pixels": MultiModalFieldElem(data=torch.rand(pixels, 4), field=each),
            "shared": MultiModalFieldElem(data=torch.tensor(7), field=shared),
            "size": MultiModalFieldElem(data=torch.tensor(size), field=each),
        }
    )


ITEMS = [item(2, (3, 4)), item(5, (5, 6)), item(1, (7, 8))]
UNLIKE = [item(2, (3, 4), pixels=1), item(5, (5, 6), pixels=3), item(1, (7, 8), pixels=2)]


def call(items: Sequence[MultiModalKwargsItem]) -> dict[str, Any]:
    """What vLLM gives to a model."""
    ((_, _, kwargs),) = group_and_batch_mm_kwargs([("image", each) for each in items])
    return kwargs


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)


def test_a_call_for_some_items_is_vllms_own(subtests: pytest.Subtests) -> None:
    for chosen, items in product([[0], [2, 0], [1, 2], [0, 1, 2]], [ITEMS, UNLIKE, ITEMS[:1]]):
        with subtests.test(chosen=chosen):
            if max(chosen) >= len(items):
                chosen = [0]
            taken = items_of(call(items), [slices_of(each) for each in items])
            expected = call([items[i] for i in chosen])
            made = joined([taken[i] for i in chosen])
            assert made.keys() == expected.keys()
            for name in made:
                assert_same(made[name], expected[name])

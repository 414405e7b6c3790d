# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anchorprune_vllm.item_fields import EACH, joined, to_elems
from anchorprune_vllm.plan import FieldSlice, ItemPlan, MediaTokens, media_key, pop_plans
from anchorprune_vllm.prompt_layout import PromptLayout

PLANS = [
    ItemPlan(
        16,
        MediaTokens(144, (144,), (12,)),
        media_key("image", MediaTokens(144, (144,), (12,)), "one"),
        torch.tensor([[1, 5, 2]]),
        PromptLayout.of([7] * 144),
        (FieldSlice(EACH, 1), FieldSlice(0, 1024)),
    ),
    ItemPlan(
        300,
        MediaTokens(310, (144, 0, 156), (12, 0, 13)),
        media_key("image", MediaTokens(310, (144, 0, 156), (12, 0, 13)), "two"),
        torch.empty(0, 0),
        PromptLayout.of([1, 7, 7, 2, 7], [False, True, True, False, True]),
    ),
]


def batched(modality: str, plans: list[ItemPlan]) -> dict[str, Any]:
    """What a model call gets, batched as vLLM does."""
    return joined([to_elems(modality, plan) for plan in plans])


def test_fields_and_back() -> None:
    kwargs = {"pixel_values": "untouched", **batched("image", PLANS)}
    read = pop_plans("image", kwargs)
    assert read is not None
    assert [replace(p, query_ids=None) for p in read] == [replace(p, query_ids=None) for p in PLANS]
    assert [p.query_ids.tolist() for p in read] == [[[1, 5, 2]], []]
    assert [p.keeps_all for p in read] == [False, True]
    assert kwargs == {"pixel_values": "untouched"}


def test_modalities_have_fields_of_their_own() -> None:
    kwargs = {**batched("image", PLANS[:1]), **batched("video", PLANS)}
    assert len(pop_plans("image", kwargs) or []) == 1
    assert len(pop_plans("video", kwargs) or []) == 2
    assert pop_plans("image", kwargs) is None


def test_all_are_kept_when_the_candidates_are() -> None:
    def keeps_all(kept: int) -> bool:
        return ItemPlan(kept, MediaTokens(14, (6, 4), (3, 2)), (0, 0), torch.empty(0, 0)).keeps_all

    assert [keeps_all(kept) for kept in (9, 10, 11, 14)] == [False, True, True, True]


def test_unit_of_each_candidate() -> None:
    def units(*sizes: int) -> Tensor | None:
        return ItemPlan(1, MediaTokens(9, sizes, sizes), (0, 0), torch.empty(0, 0)).units

    assert units(4) is None
    several = units(2, 0, 3)
    assert several is not None
    assert several.tolist() == [0, 0, 2, 2, 2]


def test_media_keys_differ() -> None:
    one, other = MediaTokens(144, (144,), (12,)), MediaTokens(144, (72, 72), (12, 12))
    keys = {media_key("image", one, f"picture-{i}") for i in range(1000)}
    keys |= {media_key("video", one, "picture-0"), media_key("image", other, "picture-0")}
    assert len(keys) == 1002
    assert media_key("image", one, "a") == media_key("image", one, "a")
    assert all(-(2**63) <= half < 2**63 for key in keys for half in key)

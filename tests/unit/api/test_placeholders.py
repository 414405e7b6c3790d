# SPDX-License-Identifier: Apache-2.0
"""What is cut out of a finished prompt, and where the items are in what is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.multimodal.processing import PromptUpdateDetails
from vllm.multimodal.processing.processor import PlaceholderFeaturesInfo, ResolvedPromptUpdate

from anchorprune_vllm.api.placeholders import cut_prompt, layout_of, planned, planned_as
from anchorprune_vllm.plan import ItemPlan, MediaTokens

IMAGE, TAG, ROW = 7, 8, 9


def details(*tokens: int) -> PromptUpdateDetails:
    return PromptUpdateDetails.select_token_id(list(tokens), IMAGE)


def plan_for(content: PromptUpdateDetails, kept: int) -> ItemPlan:
    layout = layout_of(content)
    sizes = layout.unit_sizes
    tokens = MediaTokens(layout.embeddings, sizes, sizes)
    return ItemPlan(kept, tokens, (0, 1), torch.empty(0, 0), layout)


def prompt_with(*items: tuple[PromptUpdateDetails, int]) -> tuple[list[int], Any, Any]:
    """A prompt with a word before and after each item, its placeholders and updates."""
    prompt: list[int] = [1]
    places, updates = [], []
    for number, (content, kept) in enumerate(items):
        mask = None if content.is_embed is None else content.is_embed(content.full)
        places.append(PlaceholderFeaturesInfo("image", number, len(prompt), content.full, mask))
        update: Any = ResolvedPromptUpdate("image", number, "replacement", [IMAGE], content)
        updates.append([update.with_content(planned(content, plan_for(content, kept)))])
        prompt += [*content.full, 2 + number]
    return prompt, {"image": places}, {"image": updates}


def test_items_move_up_and_keep_their_tags() -> None:
    tiles = details(TAG, *[IMAGE] * 4, TAG, TAG, *[IMAGE] * 4)
    rows = details(*[IMAGE, IMAGE, ROW] * 3, IMAGE, IMAGE)
    prompt, places = cut_prompt(*prompt_with((tiles, 3), (rows, 5)))
    assert prompt == [1, TAG, IMAGE, IMAGE, TAG, TAG, IMAGE, 2, *[IMAGE] * 5, 3]
    first, second = places["image"]
    assert (first.start_idx, first.length, first.tokens) == (1, 6, prompt[1:7])
    assert first.is_embed is not None
    assert first.is_embed.tolist() == [False, True, True, False, False, True]
    assert (second.start_idx, second.length, second.is_embed) == (8, 5, None)


def test_nothing_is_cut_where_all_is_kept() -> None:
    content = details(TAG, *[IMAGE] * 4)
    prompt, places, updates = prompt_with((content, 4))
    left, same = cut_prompt(prompt, places, updates)
    assert left == prompt
    assert same == places


def test_the_update_that_was_applied_decides() -> None:
    """A model may offer several for an item."""
    content, other = details(*[IMAGE] * 4), details(TAG, *[IMAGE] * 4)
    prompt, places, updates = prompt_with((content, 2))
    ((update,),) = updates["image"]
    unused = update.with_content(planned(other, plan_for(other, 2)))
    left, _ = cut_prompt(prompt, places, {"image": [[unused, update]]})
    assert left == [1, IMAGE, IMAGE, 2]


def test_items_without_a_plan_stay_as_they_are() -> None:
    prompt, places, updates = prompt_with((details(*[IMAGE] * 4), 2))
    ((update,),) = updates["image"]
    updates["image"] = [[replace(update, content=details(*[IMAGE] * 4))]]
    assert cut_prompt(prompt, places, updates)[0] == prompt


@pytest.mark.parametrize(("kept", "counted"), [(3, 3), (8, 8)])
def test_counted_for_metrics(kept: int, counted: int) -> None:
    content = details(TAG, *[IMAGE] * 4, TAG, TAG, *[IMAGE] * 4)
    made = planned(content, plan_for(content, kept))
    assert (made.unpruned, made.kept) == (8, counted)


def test_content_that_is_written_anew_keeps_its_plan() -> None:
    """As with an item's number, which may have more digits than before."""
    content = details(IMAGE, IMAGE, IMAGE, TAG)
    old = planned(content, plan_for(content, 2))
    anew = planned_as(details(ROW, ROW, IMAGE, IMAGE, IMAGE, TAG), old)
    assert (anew.unpruned, anew.kept) == (3, 2)
    assert anew.layout == layout_of(anew)
    whole = planned(content, plan_for(content, 3))
    assert planned_as(details(ROW, IMAGE, IMAGE, IMAGE), whole).layout is None

# SPDX-License-Identifier: Apache-2.0
"""The placeholders of images and videos in the prompt: K of them instead of N.

A model's own processor finishes the unpruned prompt; then what does not stay is cut out of it. To
shorten what is put into a prompt would not do: some prompts arrive with all placeholders in place,
and some processors change the text around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.multimodal.processing import PromptUpdateDetails
from vllm.multimodal.processing.processor import PlaceholderFeaturesInfo

from anchorprune_vllm.layout import PromptLayout
from anchorprune_vllm.plan import ItemPlan


@dataclass
class PlannedDetails(PromptUpdateDetails):
    """The unpruned content of an item, which knows what will stay of it.

    vLLM's cache of processed items keeps them, where an item's plan may be gone to the engine.
    """

    unpruned: int = 0
    """The embeddings of the model's own path."""
    kept: int = 0
    """The embeddings that the prompt keeps."""
    shares: tuple[int, ...] | None = None
    """Of the units of the prompt; None: nothing is cut."""


def planned(content: PromptUpdateDetails, plan: ItemPlan) -> PlannedDetails:
    """Return the content of an item with what its plan lets stay."""
    details = PlannedDetails(content.full, content.is_embed, unpruned=plan.tokens.unpruned)
    if plan.keeps_all:
        return replace(details, kept=plan.tokens.unpruned)
    return replace(details, kept=plan.kept, shares=tuple(plan.shares))


def layout_of(content: PromptUpdateDetails) -> PromptLayout:
    """Return the layout of an item's unpruned content."""
    full = list(content.full)
    mask = None if content.is_embed is None else content.is_embed(full).tolist()
    return PromptLayout.of(full, mask)


def cut_prompt(
    prompt: list[int],
    placeholders: Mapping[str, Sequence[PlaceholderFeaturesInfo]],
    updates: Mapping[str, Sequence[Sequence[Any]]],
) -> tuple[list[int], dict[str, list[PlaceholderFeaturesInfo]]]:
    """Take what does not stay out of an unpruned prompt.

    Args:
        prompt: token ids.
        placeholders: of all items by modality, as vLLM found them in the prompt.
        updates: the updates of each item, of which some have `PlannedDetails`.

    Returns:
        The prompt and the placeholders that are left.
    """
    stays = torch.ones(len(prompt), dtype=torch.bool)
    for modality, found in placeholders.items():
        for place in found:
            mask = _stays(place, updates[modality][place.item_idx])
            if mask is not None:
                stays[place.start_idx : place.start_idx + place.length] = torch.tensor(mask)
    if bool(stays.all()):
        return prompt, {modality: list(found) for modality, found in placeholders.items()}
    moved = (stays.cumsum(0) - stays.long()).tolist()  # where each token goes
    return (
        torch.tensor(prompt)[stays].tolist(),
        {
            modality: [
                _shortened(place, stays[place.start_idx :][: place.length], moved)
                for place in found
            ]
            for modality, found in placeholders.items()
        },
    )


def _stays(place: PlaceholderFeaturesInfo, updates: Sequence[Any]) -> list[bool] | None:
    """Return which tokens of an item's placeholder stay; None: all of them."""
    for update in updates:
        details = update.content
        if isinstance(details, PlannedDetails) and len(details.full) == place.length:
            if details.shares is None:
                return None
            return layout_of(details).stays(details.shares)
    return None


def _shortened(
    place: PlaceholderFeaturesInfo, stays: torch.Tensor, moved: Sequence[int]
) -> PlaceholderFeaturesInfo:
    is_embed = None if place.is_embed is None else place.is_embed[stays]
    if is_embed is not None and bool(is_embed.all()):
        is_embed = None
    tokens = torch.tensor(place.tokens)[stays].tolist()
    return replace(place, start_idx=moved[place.start_idx], tokens=tokens, is_embed=is_embed)

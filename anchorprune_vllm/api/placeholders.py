# SPDX-License-Identifier: Apache-2.0
"""Shorten a prompt: an image or video gets K placeholders in it instead of N.

The model's own processor finishes the unpruned prompt, and then the tokens that do not stay are cut
out of it. Shortening what the processor inserts is not enough, because some prompts arrive with all
placeholders in place, and some processors change the text around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.multimodal.processing import PromptUpdateDetails
from vllm.multimodal.processing.processor import PlaceholderFeaturesInfo

from anchorprune_vllm.frame_texts import item_length
from anchorprune_vllm.plan import ItemPlan
from anchorprune_vllm.prompt_layout import PromptLayout


@dataclass
class PlannedDetails(PromptUpdateDetails):
    """The unpruned prompt content of an item, and how many of its embeddings will stay.

    vLLM's processor cache stores these details. The plan itself may not be at hand there: once sent
    to the engine, it can be dropped from the API process.
    """

    unpruned: int = 0
    """The number of embeddings on the model's own path."""
    kept: int = 0
    """The number of embeddings that stay in the prompt."""
    layout: PromptLayout | None = None
    """The layout of the content, or None if nothing is cut."""


def planned(content: PromptUpdateDetails, plan: ItemPlan) -> PlannedDetails:
    """Return the content of an item, marked with what stays of it according to its plan."""
    details = PlannedDetails(content.full, content.is_embed, unpruned=plan.tokens.unpruned)
    if plan.keeps_all:
        return replace(details, kept=plan.tokens.unpruned)
    layout = replace(layout_of(content), margin=plan.layout.margin)
    return replace(details, kept=plan.kept, layout=layout)


def planned_as(content: PromptUpdateDetails, before: PlannedDetails) -> PlannedDetails:
    """Return an item's rewritten content (with another number, say), marked as it was before."""
    layout = before.layout
    if layout is not None:
        layout = replace(layout_of(content), margin=layout.margin)
    return PlannedDetails(content.full, content.is_embed, before.unpruned, before.kept, layout)


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
    """Cut the tokens that do not stay out of an unpruned prompt.

    Args:
        prompt: The token ids of the unpruned prompt.
        placeholders: The placeholders of all items by modality, as vLLM found them in the prompt.
        updates: The prompt updates of each item by modality; some have `PlannedDetails`.

    Returns:
        The shortened prompt, and the placeholders in it.
    """
    ids = torch.tensor(prompt)
    stays = torch.ones(len(prompt), dtype=torch.bool)
    unpruned: dict[str, list[PlaceholderFeaturesInfo]] = {}
    for modality, found in placeholders.items():
        unpruned[modality] = []
        for place in found:
            part = slice(place.start_idx, place.start_idx + place.length)
            details = _details(place, updates[modality][place.item_idx])
            if details is not None and details.layout is not None:
                if details.layout.moves_text:  # the worker fills text in too: all are placeholders
                    length = item_length(details.layout, details.kept)
                    stays[part] = torch.arange(place.length) < length
                    ids[part] = details.layout.placeholder
                    place = replace(place, tokens=ids[part].tolist(), is_embed=None)
                else:
                    shares = details.layout.shares(details.kept)
                    stays[part] = torch.tensor(details.layout.stays(shares))
            unpruned[modality].append(place)
    if bool(stays.all()):
        return prompt, unpruned
    moved = (stays.cumsum(0) - stays.long()).tolist()  # the new index of each token that stays
    return (
        ids[stays].tolist(),
        {
            modality: [
                _shortened(place, stays[place.start_idx :][: place.length], moved)
                for place in found
            ]
            for modality, found in unpruned.items()
        },
    )


def _details(place: PlaceholderFeaturesInfo, updates: Sequence[Any]) -> PlannedDetails | None:
    """Return the planned details for an item's placeholder, or None if it has none."""
    for update in updates:
        details = update.content
        if isinstance(details, PlannedDetails) and len(details.full) == place.length:
            return details
    return None


def _shortened(
    place: PlaceholderFeaturesInfo, stays: torch.Tensor, moved: Sequence[int]
) -> PlaceholderFeaturesInfo:
    """Return the placeholder of an item after its prompt was cut."""
    is_embed = None if place.is_embed is None else place.is_embed[stays]
    if is_embed is not None and bool(is_embed.all()):
        is_embed = None
    tokens = torch.tensor(place.tokens)[stays].tolist()
    return replace(place, start_idx=moved[place.start_idx], tokens=tokens, is_embed=is_embed)

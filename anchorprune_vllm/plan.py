# SPDX-License-Identifier: Apache-2.0
"""What travels with a media item from the processor (API process) to the model (worker).

vLLM carries tensors only, so a plan is written as small CPU tensors and read back as Python values:
reading them in the worker waits for no device.
"""

from __future__ import annotations

import hashlib
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anchorprune_vllm.prompt_layout import PromptLayout

MediaKey = tuple[int, int]

_NO_LAYOUT = PromptLayout(())

DUMMY_MEDIA: MediaKey = (0, 0)
"""Of the items that vLLM makes up, to profile memory and to warm up."""


class PlanFields(NamedTuple):
    """Names of the fields of one modality's items; each field belongs to one modality in vLLM."""

    counts: str
    media: str
    query: str
    layout: str
    slices: str

    @classmethod
    def of(cls, modality: str) -> PlanFields:
        return cls(*(f"anchorprune_{modality}_{name}" for name in cls._fields))


class MediaTokens(NamedTuple):
    """The tokens of one image or video, whatever is asked about it."""

    unpruned: int
    """Tokens of the model's own path, those included that are never kept (newlines)."""
    unit_sizes: tuple[int, ...]
    """Candidates of each unit (crop, frame), in order."""
    unit_widths: tuple[int, ...]
    """Candidates in a row of each unit."""

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each unit."""
        units = zip(self.unit_sizes, self.unit_widths, strict=True)
        return tuple((size // width if size else 0, width) for size, width in units)

    @property
    def candidates(self) -> int:
        return sum(self.unit_sizes)

    def are_all_kept(self, kept: int) -> bool:
        """Whether the model's own unpruned path serves an item that may keep so many."""
        return kept >= self.candidates


class FieldSlice(NamedTuple):
    """An item's part of one of the arguments that the model's own processor makes."""

    axis: int
    """The axis along which items lie behind each other, or what `item_fields.py` has for none."""
    size: int
    """The item's length on that axis."""


Slices = tuple[FieldSlice, ...]
"""Of all fields of an item, in the order of their names."""


@dataclass(frozen=True)
class ItemPlan:
    """How many of an item's candidates stay, which media it is, and what was asked about it."""

    kept: int
    tokens: MediaTokens
    media_key: MediaKey
    query_ids: Tensor
    """[segments, length] token ids for the text encoder; no segments: no query."""
    layout: PromptLayout = _NO_LAYOUT
    """The tokens of the unpruned prompt."""
    slices: Slices = ()
    """The item's part of the model's own fields."""

    @property
    def keeps_all(self) -> bool:
        """The model's own unpruned path serves this item."""
        return self.tokens.are_all_kept(self.kept)

    @property
    def is_dummy(self) -> bool:
        """Nobody has asked for this item."""
        return self.media_key == DUMMY_MEDIA

    @property
    def units(self) -> Tensor | None:
        """[N] int64 on the CPU: the unit of each candidate; None for a single unit."""
        sizes = torch.tensor(self.tokens.unit_sizes)
        return torch.arange(len(sizes)).repeat_interleave(sizes) if len(sizes) > 1 else None

    @property
    def shares(self) -> list[int]:
        """The embeddings kept of each unit of the prompt: K, where the budget is not divided."""
        return self.layout.shares(self.kept)

    @property
    def moves_text(self) -> bool:
        """The worker puts the text of this video among the rows that it keeps."""
        return self.layout.moves_text and not self.keeps_all


def media_key(modality: str, tokens: MediaTokens, media_hash: str) -> MediaKey:
    """128 bits, as two signed 64-bit integers, that name the media in the worker.

    A hash alone would not do: it may be a client's uuid, given to another picture later.
    """
    name = f"{modality} {tokens} {media_hash}"
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return (
        int.from_bytes(digest[:8], "big", signed=True),
        int.from_bytes(digest[8:], "big", signed=True),
    )


def to_tensors(modality: str, plan: ItemPlan) -> dict[str, Tensor]:
    """Write a plan: [2 + 2 units], [2], [M, L], [1 + pieces, 3] and [fields, 2] of an item."""
    tokens = plan.tokens
    values = (
        torch.tensor((plan.kept, tokens.unpruned, *tokens.unit_sizes, *tokens.unit_widths)),
        torch.tensor(plan.media_key, dtype=torch.int64),
        plan.query_ids,
        plan.layout.to_tensor(),
        torch.tensor(plan.slices, dtype=torch.int64).reshape(-1, 2),
    )
    return dict(zip(PlanFields.of(modality), values, strict=True))


def pop_plans(modality: str, kwargs: MutableMapping[str, Any]) -> list[ItemPlan] | None:
    """Take the plans out of a model call's keyword arguments; None if the call carries none."""
    fields = PlanFields.of(modality)
    if fields.counts not in kwargs:
        return None
    values = [kwargs.pop(name) for name in fields]
    return [read_plan(*item) for item in zip(*values, strict=True)]


def read_plan(
    counts: Tensor, media: Tensor, query_ids: Tensor, layout: Tensor, slices: Tensor
) -> ItemPlan:
    """Read what `to_tensors` wrote."""
    high, low = media.tolist()
    return ItemPlan(
        *read_counts(counts),
        (high, low),
        query_ids,
        PromptLayout.from_tensor(layout),
        tuple(FieldSlice(*each) for each in slices.tolist()),
    )


def read_counts(field: Tensor) -> tuple[int, MediaTokens]:
    """`kept` and `tokens` of one item's plan, from its field [2 + 2 units]."""
    kept, unpruned, *units = field.tolist()
    half = len(units) // 2
    return kept, MediaTokens(unpruned, tuple(units[:half]), tuple(units[half:]))

# SPDX-License-Identifier: Apache-2.0
"""The plan that travels with an image or video from the API process to the worker.

vLLM carries only tensors, so a plan is written as small CPU tensors and read back as Python values.
Reading them in the worker does not wait for a device.
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
"""The name of a media in the worker, see `media_key`."""

_NO_LAYOUT = PromptLayout(())

DUMMY_MEDIA: MediaKey = (0, 0)
"""The key of the dummy items that vLLM makes to profile memory and to warm up."""


class PlanFields(NamedTuple):
    """The names of a plan's fields for one modality, since vLLM has no fields for several."""

    counts: str
    media: str
    query: str
    layout: str
    slices: str

    @classmethod
    def of(cls, modality: str) -> PlanFields:
        return cls(*(f"anchorprune_{modality}_{name}" for name in cls._fields))


class MediaTokens(NamedTuple):
    """The numbers of tokens of one image or video, which do not depend on the question."""

    unpruned: int
    """The tokens of the model's own path, including those that are never kept (newlines)."""
    unit_sizes: tuple[int, ...]
    """The number of candidates of each unit (crop, frame), in order."""
    unit_widths: tuple[int, ...]
    """The number of candidates in a row of each unit."""

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Return the rows and columns of each unit."""
        units = zip(self.unit_sizes, self.unit_widths, strict=True)
        return tuple((size // width if size else 0, width) for size, width in units)

    @property
    def candidates(self) -> int:
        """Return the number of all candidates."""
        return sum(self.unit_sizes)

    def are_all_kept(self, kept: int) -> bool:
        """Return whether an item that may keep `kept` tokens takes the model's unpruned path."""
        return kept >= self.candidates


class FieldSlice(NamedTuple):
    """An item's part of one of the arguments that the model's own processor makes."""

    axis: int
    """The axis along which items are joined, or the value of `item_fields.py` if there is none."""
    size: int
    """The item's length on that axis."""


Slices = tuple[FieldSlice, ...]
"""The slices of all fields of an item, in the order of their names."""


@dataclass(frozen=True)
class ItemPlan:
    """The plan of an item: how many candidates stay, which media it is, and its question."""

    kept: int
    tokens: MediaTokens
    media_key: MediaKey
    query_ids: Tensor
    """The token ids of the question, [segments, length]; without a question, 0 segments."""
    layout: PromptLayout = _NO_LAYOUT
    """The tokens of the unpruned prompt."""
    slices: Slices = ()
    """The item's part of the model's own fields."""

    @property
    def keeps_all(self) -> bool:
        """Return whether the item takes the model's own unpruned path."""
        return self.tokens.are_all_kept(self.kept)

    @property
    def is_dummy(self) -> bool:
        """Return whether this is a dummy item of vLLM."""
        return self.media_key == DUMMY_MEDIA

    @property
    def units(self) -> Tensor | None:
        """Return the unit of each candidate, int64 [N] on the CPU, or None for a single unit."""
        sizes = torch.tensor(self.tokens.unit_sizes)
        return torch.arange(len(sizes)).repeat_interleave(sizes) if len(sizes) > 1 else None

    @property
    def shares(self) -> list[int]:
        """Return the embeddings kept of each unit of the prompt; only K if there are no shares."""
        return self.layout.shares(self.kept)

    @property
    def moves_text(self) -> bool:
        """Return whether the worker puts the text of this video among the rows that it keeps."""
        return self.layout.moves_text and not self.keeps_all


def media_key(modality: str, tokens: MediaTokens, media_hash: str) -> MediaKey:
    """Return 128 bits, as two signed 64-bit integers, that identify the media in the worker.

    The hash alone is not enough: it may be a client's uuid, which is reused for another image.
    """
    name = f"{modality} {tokens} {media_hash}"
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return (
        int.from_bytes(digest[:8], "big", signed=True),
        int.from_bytes(digest[8:], "big", signed=True),
    )


def to_tensors(modality: str, plan: ItemPlan) -> dict[str, Tensor]:
    """Return the fields of a plan: [2 + 2 units], [2], [M, L], [1 + pieces, 3] and [fields, 2]."""
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
    """Remove the plans from the arguments of a model call and return them; None if it has none."""
    fields = PlanFields.of(modality)
    if fields.counts not in kwargs:
        return None
    values = [kwargs.pop(name) for name in fields]
    return [read_plan(*item) for item in zip(*values, strict=True)]


def read_plan(
    counts: Tensor, media: Tensor, query_ids: Tensor, layout: Tensor, slices: Tensor
) -> ItemPlan:
    """Return the plan that `to_tensors` wrote."""
    high, low = media.tolist()
    return ItemPlan(
        *read_counts(counts),
        (high, low),
        query_ids,
        PromptLayout.from_tensor(layout),
        tuple(FieldSlice(*each) for each in slices.tolist()),
    )


def read_counts(field: Tensor) -> tuple[int, MediaTokens]:
    """Return `kept` and `tokens` of an item's plan, from its field [2 + 2 units]."""
    kept, unpruned, *units = field.tolist()
    half = len(units) // 2
    return kept, MediaTokens(unpruned, tuple(units[:half]), tuple(units[half:]))

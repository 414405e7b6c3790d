# SPDX-License-Identifier: Apache-2.0
"""Split the arguments of a model call into the fields of its items, and join them again.

vLLM joins the processed fields of several items into one set of arguments, and the model does not
know where one item ends. To run the vision tower for some items, the pruner needs each item's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

from anchorprune_vllm.plan import FieldSlice, ItemPlan, Slices, to_tensors

EACH, SHARED = -100, -101
"""Stand for an axis if each item has a value of its own, and if all items share one value."""


def slice_of(elem: MultiModalFieldElem) -> FieldSlice:
    """Return how vLLM will join a field of an item with those of other items."""
    if isinstance(elem.field, MultiModalFlatField):
        data: Any = elem.data
        size = data.shape[elem.field.dim] if isinstance(data, Tensor) else len(data)
        return FieldSlice(elem.field.dim, size)
    return FieldSlice(SHARED if isinstance(elem.field, MultiModalSharedField) else EACH, 1)


def slices_of(item: Mapping[str, MultiModalFieldElem]) -> Slices:
    """Return how vLLM will join all fields of an item with those of other items."""
    return tuple(slice_of(item[name]) for name in sorted(item))


def items_of(kwargs: Mapping[str, Any], slices: Sequence[Slices]) -> list[MultiModalKwargsItem]:
    """Return the fields of each item of a call, split from the arguments of the call."""
    items: list[dict[str, MultiModalFieldElem]] = [{} for _ in slices]
    for name, parts in zip(sorted(kwargs), zip(*slices, strict=True), strict=True):
        value, start = kwargs[name], 0
        for number, (axis, size) in enumerate(parts):
            if axis == SHARED:
                data, field = value, MultiModalSharedField(batch_size=len(slices))
            elif axis == EACH:
                data, field = value[number], MultiModalBatchedField()
            else:
                is_tensor = isinstance(value, Tensor)
                data = value.narrow(axis, start, size) if is_tensor else value[start : start + size]
                field = MultiModalFlatField(slices=(), dim=axis)
                start += size
            items[number][name] = MultiModalFieldElem(data=data, field=field)
    return [MultiModalKwargsItem(item) for item in items]


def joined(items: Sequence[Mapping[str, MultiModalFieldElem]]) -> dict[str, Any]:
    """Return the arguments of a call for some items, joined as vLLM itself would do it."""
    return {
        name: items[0][name].field.reduce_data([item[name] for item in items]) for name in items[0]
    }


def each_alone(values: Mapping[str, Any]) -> MultiModalKwargsItem:
    """Return an item whose fields each have one value per item."""
    field = MultiModalBatchedField()
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=value, field=field) for name, value in values.items()}
    )


def cut_between_frames(
    item: Mapping[str, MultiModalFieldElem], modality: str, frames: int, at_once: int
) -> list[MultiModalKwargsItem]:
    """Cut a video into parts of at most `at_once` frames, by its grid of patches.

    An item without such a grid is returned whole.
    """
    name = f"{modality}_grid_thw"
    if frames <= at_once or name not in item:
        return [MultiModalKwargsItem(item)]
    parts = []
    for start in range(0, frames, at_once):
        count = min(at_once, frames - start)
        part = {**item, name: _with_data(item[name], _with_frames(item[name].data, count))}
        for other, elem in item.items():
            if isinstance(elem.field, MultiModalFlatField):
                axis, size = slice_of(elem)
                of_frame = size // frames
                pixels = elem.data.narrow(axis, start * of_frame, count * of_frame)
                part[other] = _with_data(elem, pixels)
        parts.append(MultiModalKwargsItem(part))
    return parts


def _with_frames(grid: Any, frames: int) -> Tensor:
    grid = grid.clone()
    grid.view(-1)[0] = frames  # some processors return it as [1, 3]
    return grid


def _with_data(elem: MultiModalFieldElem, data: Any) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=data, field=elem.field)


def to_elems(modality: str, plan: ItemPlan) -> dict[str, MultiModalFieldElem]:
    """Return a plan as additional fields of its item, which stay on the host."""
    field = MultiModalBatchedField(keep_on_cpu=True)
    return {
        name: MultiModalFieldElem(data=value, field=field)
        for name, value in to_tensors(modality, plan).items()
    }

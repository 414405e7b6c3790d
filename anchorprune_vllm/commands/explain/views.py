# SPDX-License-Identifier: Apache-2.0
"""What the vision tower gets of an item, and which pixels of it belong to which token.

Pictures are made of the very pixels that the model is called with: what a processor has cropped
away is not there, and letterbox padding is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    unpad_image,
)

from anchorprune_vllm.models.families.plain import Consecutive
from anchorprune_vllm.models.general.adapter import GeneralModel
from anchorprune_vllm.models.llava.llava_next import PrunedLlavaNext, unpruned_index_of
from anchorprune_vllm.models.llava.llava_onevision import OnevisionPrunedModel
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.testing.local_model import LocalModel

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels of the view."""

_FRAMES_IN_A_ROW = 8
_BACKGROUND = "#dce0e6"
_UNSEEN = (336, 336)
"""The size of a unit whose pixels are not known."""


@dataclass(frozen=True)
class UnitView:
    """An image, a crop or a frame in a view: its name, its place, and that of its candidates."""

    name: str
    box: Box
    tokens: tuple[Box, ...]


@dataclass(frozen=True)
class View:
    """All units of an item, laid out in one picture."""

    picture: Image.Image
    units: tuple[UnitView, ...]

    @property
    def tokens(self) -> list[Box]:
        """Boxes of all candidates, in order."""
        return [box for unit in self.units for box in unit.tokens]


@dataclass(frozen=True)
class _Part:
    """A unit before it is laid out: boxes are in its own picture."""

    name: str
    picture: Image.Image
    tokens: list[Box]
    row: int = 0
    column: int = 0


def view_of(
    model: LocalModel,
    modality: str,
    kwargs: dict[str, Any],
    tokens: MediaTokens,
    given: Image.Image | None = None,
) -> View:
    """Return a view of the one item of a call.

    Args:
        model: what it is shown to.
        modality: "image" or "video".
        kwargs: the arguments of the call.
        tokens: how the item's tokens were counted.
        given: the image as it was given, which is shown where the pixels of its units cannot be
            found among the arguments.
    """
    if isinstance(model.model, Consecutive) and f"{modality}_grid_thw" in kwargs:
        return _laid_out(_frames_of_patches(model, modality, kwargs, tokens))
    if isinstance(model.model, GeneralModel):
        return _laid_out(_units(model, modality, kwargs, tokens, given))
    if modality == "video":
        return _laid_out(_pooled_frames(model, kwargs["pixel_values_videos"][0], tokens))
    pixels = kwargs["pixel_values"][0]
    if isinstance(model.model, PrunedLlavaNext):
        return _laid_out(_base_and_crops(model, pixels, kwargs["image_sizes"][0]))
    if isinstance(model.model, OnevisionPrunedModel):
        return _laid_out(_base_and_picture(model, pixels, kwargs["image_sizes"][0], tokens))
    (picture,) = _tiles(model, pixels[None])
    return _laid_out([_Part("image", picture, _grid(picture.size, *tokens.grids[0]))])


def _base_and_crops(model: LocalModel, pixels: Tensor, image_size: Tensor) -> list[_Part]:
    """LLaVA-NeXT: candidates are the patches of each tile that show the picture."""
    config = model.model.config
    places = unpruned_index_of(config, image_size)  # [1 + crops, patches]
    _, columns = _crop_grid(config, image_size)
    parts = []
    for number, picture in enumerate(_tiles(model, pixels[: len(places)])):
        side = _side(config)
        patches = _grid(picture.size, side, side)
        shown = [
            box for box, place in zip(patches, places[number].tolist(), strict=True) if place >= 0
        ]
        row, column = divmod(number - 1, columns)
        parts.append(
            _Part(f"crop {number}", picture, shown, row, column + 1)
            if number
            else _Part("base view", picture, shown)
        )
    return parts


def _base_and_picture(
    model: LocalModel, pixels: Tensor, image_size: Tensor, tokens: MediaTokens
) -> list[_Part]:
    """LLaVA-OneVision: the base view, and the picture that the crops make up, unpadded.

    The model may scale that picture's patches: a token is then more than a patch.
    """
    config = model.model.config
    rows, columns = _crop_grid(config, image_size)
    base, *crops = _tiles(model, pixels[: 1 + rows * columns])
    whole = Image.new("RGB", (columns * base.width, rows * base.height))
    for number, crop in enumerate(crops):
        row, column = divmod(number, columns)
        whole.paste(crop, (column * base.width, row * base.height))
    side = _side(config)
    patch = base.width // side
    numbers = torch.arange(rows * side * columns * side).view(1, rows * side, columns * side)
    left = unpad_image(numbers, tuple(image_size.tolist()))[0]
    (base_grid, grid) = tokens.grids
    parts = [_Part("base view", base, _grid(base.size, *base_grid))]
    if left.numel() and grid[0]:  # of a very flat picture nothing is left
        top, start = divmod(int(left[0, 0]), columns * side)
        bottom, end = divmod(int(left[-1, -1]), columns * side)
        shown = whole.crop((patch * start, patch * top, patch * (end + 1), patch * (bottom + 1)))
        parts.append(_Part("all crops", shown, _grid(shown.size, *grid), 0, 1))
    return parts


def _pooled_frames(model: LocalModel, pixels: Tensor, tokens: MediaTokens) -> list[_Part]:
    """LLaVA-OneVision and LLaVA-Video: several patches of a frame are one token."""
    config = model.model.config
    parts = []
    for number, picture in enumerate(_tiles(model, pixels)):
        rows, columns = tokens.grids[number]
        covered = picture.size
        if getattr(config, "mm_spatial_pool_mode", "bilinear") != "bilinear":
            # Windows of whole patches: what fills none, on the right and below, is in no token.
            window = config.mm_spatial_pool_stride * (picture.width // _side(config))
            covered = (columns * window, rows * window)
        name = f"frame {number + 1}"
        parts.append(_in_strip(number, name, picture, _grid(covered, rows, columns)))
    return parts


def _units(
    model: LocalModel,
    modality: str,
    kwargs: dict[str, Any],
    tokens: MediaTokens,
    given: Image.Image | None,
) -> list[_Part]:
    """The tiles, frames or the one image of a model of which no more is known than its units."""
    grids = [grid for grid in tokens.grids if grid[0]]
    pictures = _pixels_of_units(model, kwargs, len(grids))
    if not pictures:
        size = _UNSEEN if given is None else given.size
        pictures = [given or Image.new("RGB", size, _BACKGROUND)] * len(grids)
    name = {"image": "tile", "video": "frame"}[modality]
    if len(grids) == 1:
        is_known = model.model.tower_signals.is_stated
        name = "image" if is_known else "image, if its tokens are a grid as they are drawn"
        return [_Part(name, pictures[0], _grid(pictures[0].size, *grids[0]))]
    return [
        _in_strip(number, f"{name} {number + 1}", picture, _grid(picture.size, *grid))
        for number, (picture, grid) in enumerate(zip(pictures, grids, strict=True))
    ]


def _pixels_of_units(model: LocalModel, kwargs: dict[str, Any], units: int) -> list[Image.Image]:
    """Return what the tower gets, where there is one array of pixels per unit; else nothing."""
    processor = model.processor.info.get_hf_processor()
    if not hasattr(getattr(processor, "image_processor", None), "image_mean"):
        return []  # what it did to the colours is not known
    for name, value in kwargs.items():
        if not name.startswith("pixel_values"):
            continue
        pixels = value[0] if isinstance(value, list) else value
        if pixels.ndim >= 3 and pixels.shape[-3] == 3:
            pixels = pixels.reshape(-1, *pixels.shape[-3:])
            if len(pixels) == units:
                return _as_pictures(model, pixels)
    return []


def _frames_of_patches(
    model: LocalModel, modality: str, kwargs: dict[str, Any], tokens: MediaTokens
) -> list[_Part]:
    """Qwen and GLM: patches come in the order of the tokens that they are merged into."""
    vision = model.model.config.vision_config
    name = "pixel_values" if modality == "image" else "pixel_values_videos"
    ((frames, rows, columns),) = kwargs[f"{modality}_grid_thw"].tolist()
    merge, patch, pair = vision.spatial_merge_size, vision.patch_size, vision.temporal_patch_size
    shape = (frames, rows // merge, columns // merge, merge, merge, 3, pair, patch, patch)
    # To frames, the first of each pair, then channels, then height and width.
    ordered = kwargs[name].reshape(shape).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)[:, 0]
    pictures = _as_pictures(model, ordered.reshape(frames, 3, rows * patch, columns * patch))
    if modality == "image":
        return [_Part("image", pictures[0], _grid(pictures[0].size, *tokens.grids[0]))]
    return [
        _in_strip(
            number,
            f"frames {pair * number + 1} to {pair * number + pair}",
            picture,
            _grid(picture.size, *tokens.grids[number]),
        )
        for number, picture in enumerate(pictures)
    ]


def _in_strip(number: int, name: str, picture: Image.Image, tokens: list[Box]) -> _Part:
    return _Part(name, picture, tokens, *divmod(number, _FRAMES_IN_A_ROW))


def _tiles(model: LocalModel, pixels: Tensor) -> list[Image.Image]:
    """[T, 3, S, S] as pictures, as far as patches reach."""
    vision = model.model.config.vision_config
    seen = _side(model.model.config) * vision.patch_size
    return _as_pictures(model, pixels[..., :seen, :seen])


def _as_pictures(model: LocalModel, pixels: Tensor) -> list[Image.Image]:
    """[T, 3, H, W], normalised unless they are bytes, as pictures."""
    if pixels.dtype != torch.uint8:
        processor = model.processor.info.get_hf_processor().image_processor
        mean, std = (
            torch.tensor(values, dtype=torch.float32)[:, None, None]
            for values in (processor.image_mean, processor.image_std)
        )
        values = (pixels.float().cpu() * std + mean) * 255
        pixels = values.round().clamp(0, 255).to(torch.uint8)
    arrays: np.ndarray = pixels.cpu().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(array) for array in arrays]


def _side(config: Any) -> int:
    """Patches in a row of a tile."""
    return config.vision_config.image_size // config.vision_config.patch_size


def _crop_grid(config: Any, image_size: Tensor) -> tuple[int, int]:
    """Rows and columns of an image's crops."""
    return get_anyres_image_grid_shape(
        tuple(image_size.tolist()), config.image_grid_pinpoints, config.vision_config.image_size
    )


def _grid(size: tuple[int, int], rows: int, columns: int) -> list[Box]:
    """Boxes of equal size, row by row."""
    width, height = size[0] / columns, size[1] / rows
    return [
        (column * width, row * height, (column + 1) * width, (row + 1) * height)
        for row in range(rows)
        for column in range(columns)
    ]


def _laid_out(parts: Sequence[_Part]) -> View:
    """Parts by row and column, each column as wide and each row as high as it must be.

    Above each there is room for its name. Column 0 of an image with crops, its base view, stands
    at the top.
    """
    several = len(parts) > 1
    gap = max(4, parts[0].picture.width // 24) if several else 0
    room = 2 * gap
    widths, heights = _extents(parts)
    lefts = [sum(widths[:column]) + gap * column for column in range(len(widths))]
    tops = [sum(heights[:row]) + room * (row + 1) for row in range(len(heights))]
    size = (lefts[-1] + widths[-1], tops[-1] + heights[-1])
    picture = Image.new("RGB", size, _BACKGROUND)
    units = []
    for part in parts:
        x, y = lefts[part.column], tops[part.row]
        picture.paste(part.picture, (x, y))
        boxes = tuple((x + a, y + b, x + c, y + d) for a, b, c, d in part.tokens)
        box = (x, y, x + part.picture.width, y + part.picture.height)
        units.append(UnitView(part.name, box, boxes))
    return View(picture, tuple(units))


def _extents(parts: Sequence[_Part]) -> tuple[list[int], list[int]]:
    """Widths of columns and heights of rows."""
    widths = [0] * (1 + max(part.column for part in parts))
    heights = [0] * (1 + max(part.row for part in parts))
    for part in parts:
        widths[part.column] = max(widths[part.column], part.picture.width)
        heights[part.row] = max(heights[part.row], part.picture.height)
    return widths, heights

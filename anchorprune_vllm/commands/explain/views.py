# SPDX-License-Identifier: Apache-2.0
"""Finds what the vision tower sees of an item, and which pixels belong to which token.

Images are made of the very pixels that the model is called with: what a processor has cropped away
is missing, and its padding is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    unpad_image,
)

from anchorprune_vllm.commands.explain.explanation import PixelBox, UnitView, View
from anchorprune_vllm.models.families.plain import Consecutive
from anchorprune_vllm.models.general.adapter import GeneralModel
from anchorprune_vllm.models.llava.llava_next import PrunedLlavaNext, unpruned_index_of
from anchorprune_vllm.models.llava.llava_onevision import OnevisionPrunedModel
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.testing.local_model import LocalModel

_FRAMES_IN_A_ROW = 8
_BACKGROUND = "#dce0e6"
_UNSEEN = (336, 336)
"""The size of a unit whose pixels are not known."""


@dataclass(frozen=True)
class _Part:
    """A unit, and the row and column where it will stand; boxes are in its own image."""

    name: str
    image: Image.Image
    tokens: list[PixelBox]
    row: int = 0
    column: int = 0


def view_of(
    model: LocalModel,
    modality: str,
    kwargs: dict[str, Any],
    tokens: MediaTokens,
    given: Image.Image | None = None,
) -> View:
    """Return a view of the only item in a call of the model.

    Args:
        modality: "image" or "video".
        kwargs: the arguments of the call.
        tokens: how the item's tokens were counted.
        given: the image as the user gave it, which is shown if the arguments do not tell the pixels
            of its units.
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
        return _laid_out(_base_and_whole(model, pixels, kwargs["image_sizes"][0], tokens))
    (image,) = _tiles(model, pixels[None])
    return _laid_out([_Part("image", image, _grid(image.size, *tokens.grids[0]))])


def _laid_out(parts: Sequence[_Part]) -> View:
    """Put parts into rows and columns, as wide and as high as they need, each below its name."""
    gap = max(4, parts[0].image.width // 24) if len(parts) > 1 else 0
    widths = _largest((part.column, part.image.width) for part in parts)
    heights = _largest((part.row, part.image.height) for part in parts)
    lefts = [sum(widths[:column]) + gap * column for column in range(len(widths))]
    tops = [sum(heights[:row]) + 2 * gap * (row + 1) for row in range(len(heights))]
    size = (lefts[-1] + widths[-1], tops[-1] + heights[-1])
    image = Image.new("RGB", size, _BACKGROUND)
    units = []
    for part in parts:
        x, y = lefts[part.column], tops[part.row]
        image.paste(part.image, (x, y))
        boxes = tuple((x + a, y + b, x + c, y + d) for a, b, c, d in part.tokens)
        box = (x, y, x + part.image.width, y + part.image.height)
        units.append(UnitView(part.name, box, boxes))
    return View(image, tuple(units))


def _largest(sizes: Iterable[tuple[int, int]]) -> list[int]:
    """Return the largest size at each place, from pairs of place and size."""
    found: dict[int, int] = {}
    for place, size in sizes:
        found[place] = max(size, found.get(place, 0))
    return [found.get(place, 0) for place in range(1 + max(found))]


# -- LLaVA-NeXT, LLaVA-OneVision, LLaVA-Video -----------------------------------------------------


def _base_and_crops(model: LocalModel, pixels: Tensor, image_size: Tensor) -> list[_Part]:
    """Return LLaVA-NeXT's tiles, whose candidates are the patches that show the image."""
    config = model.model.config
    places = unpruned_index_of(config, image_size)  # [1 + crops, patches]
    _, columns = _crop_grid(config, image_size)
    parts = []
    for number, image in enumerate(_tiles(model, pixels[: len(places)])):
        patches = zip(_grid(image.size, *[_side(config)] * 2), places[number], strict=True)
        shown = [box for box, place in patches if place >= 0]
        if number == 0:
            parts.append(_Part("base view", image, shown))
            continue
        row, column = divmod(number - 1, columns)
        parts.append(_Part(f"crop {number}", image, shown, row, column + 1))
    return parts


def _base_and_whole(
    model: LocalModel, pixels: Tensor, image_size: Tensor, tokens: MediaTokens
) -> list[_Part]:
    """Return LLaVA-OneVision's base view, and the image that its crops make up without padding.

    The model may scale down the patches of that image: a token is then more than a patch.
    """
    config = model.model.config
    rows, columns = _crop_grid(config, image_size)
    base, *crops = _tiles(model, pixels[: 1 + rows * columns])
    base_grid, grid = tokens.grids
    parts = [_Part("base view", base, _grid(base.size, *base_grid))]
    whole = Image.new("RGB", (columns * base.width, rows * base.height))
    for number, crop in enumerate(crops):
        row, column = divmod(number, columns)
        whole.paste(crop, (column * base.width, row * base.height))
    side = _side(config)
    patch = base.width // side
    numbers = torch.arange(rows * side * columns * side).view(1, rows * side, columns * side)
    left = unpad_image(numbers, tuple(image_size.tolist()))[0]
    if left.numel() and grid[0]:  # nothing is left of a very flat image
        top, start = divmod(int(left[0, 0]), columns * side)
        bottom, end = divmod(int(left[-1, -1]), columns * side)
        shown = whole.crop((patch * start, patch * top, patch * (end + 1), patch * (bottom + 1)))
        parts.append(_Part("all crops", shown, _grid(shown.size, *grid), 0, 1))
    return parts


def _pooled_frames(model: LocalModel, pixels: Tensor, tokens: MediaTokens) -> list[_Part]:
    """Return frames in which a token is pooled from several patches."""
    config = model.model.config
    parts = []
    for number, image in enumerate(_tiles(model, pixels)):
        rows, columns = tokens.grids[number]
        covered = image.size
        if getattr(config, "mm_spatial_pool_mode", "bilinear") != "bilinear":
            # Whole windows are pooled: patches on the right and below that fill none are left out.
            window = config.mm_spatial_pool_stride * (image.width // _side(config))
            covered = (columns * window, rows * window)
        parts.append(_in_strip(number, f"frame {number + 1}", image, covered, (rows, columns)))
    return parts


def _tiles(model: LocalModel, pixels: Tensor) -> list[Image.Image]:
    """Return pixels [T, 3, S, S] as images, as far as patches reach."""
    config = model.model.config
    seen = _side(config) * config.vision_config.patch_size
    return _as_images(model, pixels[..., :seen, :seen])


def _side(config: Any) -> int:
    """Return the number of patches in a row of a tile."""
    return config.vision_config.image_size // config.vision_config.patch_size


def _crop_grid(config: Any, image_size: Tensor) -> tuple[int, int]:
    """Return the rows and columns of an image's crops."""
    return get_anyres_image_grid_shape(
        tuple(image_size.tolist()), config.image_grid_pinpoints, config.vision_config.image_size
    )


# -- other models ---------------------------------------------------------------------------------


def _frames_of_patches(
    model: LocalModel, modality: str, kwargs: dict[str, Any], tokens: MediaTokens
) -> list[_Part]:
    """Return frames of Qwen or GLM, whose patches come in the order they are merged into tokens."""
    vision = model.model.config.vision_config
    name = "pixel_values" if modality == "image" else "pixel_values_videos"
    ((frames, rows, columns),) = kwargs[f"{modality}_grid_thw"].tolist()
    merge, patch, pair = vision.spatial_merge_size, vision.patch_size, vision.temporal_patch_size
    shape = (frames, rows // merge, columns // merge, merge, merge, 3, pair, patch, patch)
    # To frames, the first of each pair, then channels, then height and width.
    ordered = kwargs[name].reshape(shape).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)[:, 0]
    images = _as_images(model, ordered.reshape(frames, 3, rows * patch, columns * patch))
    if modality == "image":
        return [_Part("image", images[0], _grid(images[0].size, *tokens.grids[0]))]
    names = [f"frames {pair * n + 1} to {pair * n + pair}" for n in range(frames)]
    return [
        _in_strip(n, names[n], image, image.size, tokens.grids[n]) for n, image in enumerate(images)
    ]


def _units(
    model: LocalModel,
    modality: str,
    kwargs: dict[str, Any],
    tokens: MediaTokens,
    given: Image.Image | None,
) -> list[_Part]:
    """Return the tiles, frames or only image of a model of which just the units are known."""
    grids = [grid for grid in tokens.grids if grid[0]]
    images = _pixels_of_units(model, kwargs, len(grids))
    if not images:
        images = [given or Image.new("RGB", _UNSEEN, _BACKGROUND)] * len(grids)
    if len(grids) == 1:
        is_known = model.model.tower_signals.is_stated
        name = "image" if is_known else "image, if its tokens are a grid as they are drawn"
        return [_Part(name, images[0], _grid(images[0].size, *grids[0]))]
    name = {"image": "tile", "video": "frame"}[modality]
    return [
        _in_strip(n, f"{name} {n + 1}", image, image.size, grid)
        for n, (image, grid) in enumerate(zip(images, grids, strict=True))
    ]


def _pixels_of_units(model: LocalModel, kwargs: dict[str, Any], units: int) -> list[Image.Image]:
    """Return what the tower gets if there is one array of pixels per unit, else nothing."""
    processor = model.processor.info.get_hf_processor()
    if not hasattr(getattr(processor, "image_processor", None), "image_mean"):
        return []  # how it has normalised the colours is not known
    for name, value in kwargs.items():
        if not name.startswith("pixel_values"):
            continue
        pixels = value[0] if isinstance(value, list) else value
        if pixels.ndim >= 3 and pixels.shape[-3] == 3:
            pixels = pixels.reshape(-1, *pixels.shape[-3:])
            if len(pixels) == units:
                return _as_images(model, pixels)
    return []


def _as_images(model: LocalModel, pixels: Tensor) -> list[Image.Image]:
    """Return pixels [T, 3, H, W] as images; they are normalised unless they are bytes."""
    if pixels.dtype != torch.uint8:
        processor = model.processor.info.get_hf_processor().image_processor
        mean, std = (
            torch.tensor(values, dtype=torch.float32)[:, None, None]
            for values in (processor.image_mean, processor.image_std)
        )
        values = (pixels.float().cpu() * std + mean) * 255
        pixels = values.round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(array) for array in pixels.cpu().permute(0, 2, 3, 1).numpy()]


def _in_strip(
    number: int,
    name: str,
    image: Image.Image,
    covered: tuple[int, int],
    grid: tuple[int, int],
) -> _Part:
    """Return a frame or tile of several, which stand in rows of eight."""
    return _Part(name, image, _grid(covered, *grid), *divmod(number, _FRAMES_IN_A_ROW))


def _grid(size: tuple[int, int], rows: int, columns: int) -> list[PixelBox]:
    """Divide a size into boxes, row by row."""
    width, height = size[0] / columns, size[1] / rows
    return [
        (column * width, row * height, (column + 1) * width, (row + 1) * height)
        for row in range(rows)
        for column in range(columns)
    ]

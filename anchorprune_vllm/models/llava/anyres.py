# SPDX-License-Identifier: Apache-2.0
"""Images cut into crops at any resolution: which patches show the picture.

Such an image is a base view (the whole picture, squeezed into one square tile) and a grid of crops.
The grid is one of the model's pinpoints; the picture is scaled to fit and letterboxed. Patches in
the padding are dropped by the model's own unpadding, and here by the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    unpad_image,
)


def unpruned_index_of_patches(
    image_size: tuple[int, int],
    pinpoints: Sequence[Sequence[int]],
    tile_size: int,
    patch_size: int,
) -> Tensor:
    """Where each patch stands among the tokens of the unpruned picture; -1 in the padding.

    There the base view comes first, then the picture row by row across the crops, with a newline
    token behind each row.

    Args:
        image_size: height and width of the picture as it was given.
        pinpoints: the model's grids, (height, width) in pixels each.
        tile_size: side of the base view and of a crop, in pixels.
        patch_size: side of a patch, in pixels.

    Returns:
        [1 + crops, patches] int64: base view first, then crops row by row; patches row by row in
        each. A CPU tensor.
    """
    side = tile_size // patch_size
    rows, columns = get_anyres_image_grid_shape(image_size, list(pinpoints), tile_size)
    number = torch.arange(rows * columns * side * side).view(rows, columns, side, side)
    # Patch numbers as they lie in the picture, and those left after unpadding.
    picture = number.transpose(1, 2).reshape(1, rows * side, columns * side)
    left = unpad_image(picture, image_size)[0]
    height, width = left.shape
    newlines = torch.arange(height)[:, None]
    index = torch.full((1 + rows * columns, side * side), -1)
    index[0] = torch.arange(side * side)
    index[1:].view(-1)[left.flatten()] = (
        side * side + newlines + torch.arange(height * width).view(height, width)
    ).flatten()
    return index

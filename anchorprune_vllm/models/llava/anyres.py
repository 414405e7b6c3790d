# SPDX-License-Identifier: Apache-2.0
"""Images that are cut into crops at any resolution: find the patches that show the image.

Such an image becomes a base view (the whole image, squeezed into one square tile) and a grid of
crops. The grid is one of the model's pinpoints; the image is scaled to fit it and letterboxed. The
model drops patches in the padding, and the same functions drop them here.
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
    """Return the index of each patch among the unpruned tokens of an image; -1 in the padding.

    Unpruned, the base view comes first, then the image row by row across the crops, with a newline
    token after each row.

    Args:
        image_size: Height and width of the image as it was given.
        pinpoints: The model's grids, each (height, width) in pixels.
        tile_size: The side of the base view and of a crop, in pixels.
        patch_size: The side of a patch, in pixels.

    Returns:
        An int64 CPU tensor [1 + crops, patches]: the base view first, then the crops row by row,
        and patches row by row in each.
    """
    side = tile_size // patch_size
    rows, columns = get_anyres_image_grid_shape(image_size, list(pinpoints), tile_size)
    number = torch.arange(rows * columns * side * side).view(rows, columns, side, side)
    # The patch numbers as they lie in the image, and those that are left after unpadding.
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

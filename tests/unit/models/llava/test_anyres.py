# SPDX-License-Identifier: Apache-2.0
"""Places are those of the model's own merging and unpadding, for every size and grid."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration

from anchorprune_vllm.models.llava.anyres import unpruned_index_of_patches

GRIDS = {
    "hub": [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)],
    "one crop": [(1, 1)],
    "up to nine": [(rows, columns) for rows in range(1, 4) for columns in range(1, 4)],
    "strip": [(1, 6)],
    "strips": [(1, 6), (6, 1)],
}


def pinpoints(grid: str, tile: int) -> list[list[int]]:
    return [[rows * tile, columns * tile] for rows, columns in GRIDS[grid]]


def any_length(rng: random.Random) -> int:
    """From 1 to 2980, small and large alike."""
    return int(10 ** rng.uniform(0, 3.4742))


@pytest.mark.parametrize(("tile", "patch"), [(336, 14), (168, 14), (70, 14), (100, 14), (64, 16)])
@pytest.mark.parametrize("grid", GRIDS)
def test_places_are_where_the_model_itself_puts_patches(grid: str, tile: int, patch: int) -> None:
    rng = random.Random(f"{grid} {tile} {patch}")
    config = SimpleNamespace(
        vision_config=SimpleNamespace(image_size=tile, patch_size=patch),
        image_grid_pinpoints=pinpoints(grid, tile),
    )
    model = SimpleNamespace(config=config, image_newline=torch.tensor([-1.0]))
    for _ in range(40):
        size = any_length(rng), any_length(rng)
        places = unpruned_index_of_patches(size, config.image_grid_pinpoints, tile, patch)
        # Numbers sent through the model's own merging: newlines are -1, padding is gone.
        numbers = torch.arange(places.numel(), dtype=torch.float32).view(*places.shape, 1)
        merged = LlavaNextForConditionalGeneration._merge_image_patch_embeddings(
            model, torch.tensor(size), numbers, strategy="spatial_unpad"
        ).flatten()
        expected = torch.full((places.numel(),), -1)
        for place, number in enumerate(merged.long().tolist()):
            if number >= 0:
                expected[number] = place
        assert places.flatten().tolist() == expected.tolist(), size


def drawn(size: tuple[int, int], grid: str) -> list[str]:
    """Crops as they lie in the picture, 2 x 2 patches each: # is picture, . is padding."""
    marked = unpruned_index_of_patches(size, pinpoints(grid, 28), 28, 14)[1:] >= 0
    rows, columns = GRIDS[grid][0]
    picture = marked.view(rows, columns, 2, 2).transpose(1, 2).reshape(rows * 2, columns * 2)
    return ["".join(".#"[int(patch)] for patch in row) for row in picture]


def test_letterbox() -> None:
    assert drawn((100, 100), "one crop") == ["##", "##"]
    assert drawn((28, 28), "strip") == [".....##....."] * 2
    assert drawn((10, 1000), "strip") == ["............"] * 2

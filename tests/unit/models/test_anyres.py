# SPDX-License-Identifier: Apache-2.0
"""Candidates are the patches that the model's own unpadding leaves, for every size and grid."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration

from anchorprune_vllm.models.anyres import picture_patches

GRIDS = {
    "hub": [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)],
    "one crop": [(1, 1)],
    "up to nine": [(rows, columns) for rows in range(1, 4) for columns in range(1, 4)],
    "strips": [(1, 6), (6, 1)],
}


def pinpoints(grid: str, tile: int) -> list[list[int]]:
    return [[rows * tile, columns * tile] for rows, columns in GRIDS[grid]]


def any_length(rng: random.Random) -> int:
    """From 1 to 2980, small and large alike."""
    return int(10 ** rng.uniform(0, 3.4742))


@pytest.mark.parametrize(("tile", "patch"), [(336, 14), (168, 14), (70, 14), (100, 14), (64, 16)])
@pytest.mark.parametrize("grid", GRIDS)
def test_candidates_are_what_the_model_itself_leaves(grid: str, tile: int, patch: int) -> None:
    rng = random.Random(f"{grid} {tile} {patch}")
    config = SimpleNamespace(
        vision_config=SimpleNamespace(image_size=tile, patch_size=patch),
        image_grid_pinpoints=pinpoints(grid, tile),
    )
    model = SimpleNamespace(config=config, image_newline=torch.tensor([-1.0]))
    for _ in range(40):
        size = any_length(rng), any_length(rng)
        marked = picture_patches(size, config.image_grid_pinpoints, tile, patch)
        # Numbers sent through the model's own merging: newlines are -1, padding is gone.
        numbers = torch.arange(marked.numel(), dtype=torch.float32).view(*marked.shape, 1)
        merged = LlavaNextForConditionalGeneration._merge_image_patch_embeddings(
            model, torch.tensor(size), numbers, strategy="spatial_unpad"
        ).flatten()
        expected = merged[merged >= 0].sort().values.long()
        assert marked.flatten().nonzero().flatten().tolist() == expected.tolist(), size
        assert marked[0].all()


def drawn(size: tuple[int, int], grid: str) -> list[str]:
    """Crops as they lie in the picture, 2 x 2 patches each: # is picture, . is padding."""
    marked = picture_patches(size, pinpoints(grid, 28), 28, 14)[1:]
    rows, columns = max(GRIDS[grid], key=lambda g: g[0] * g[1] == len(marked))
    picture = marked.view(rows, columns, 2, 2).transpose(1, 2).reshape(rows * 2, columns * 2)
    return ["".join(".#"[int(patch)] for patch in row) for row in picture]


def test_letterbox() -> None:
    assert drawn((100, 100), "one crop") == ["##", "##"]
    assert drawn((28, 28), "strips") == [".....##....."[1:-1].center(12, ".")] * 2
    assert drawn((10, 1000), "strips") == ["." * 12] * 2

# SPDX-License-Identifier: Apache-2.0
"""Frames whose patches do not fill the windows that are pooled."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anchorprune_vllm.commands.explain.views import view_of
from anchorprune_vllm.models.llava.frames import pool_frames
from anchorprune_vllm.plan import MediaTokens


@pytest.mark.parametrize(("mode", "side"), [("average", 6), ("bilinear", 7)])
def test_odd_frames(mode: str, side: int) -> None:
    """13 patches in a row, in a frame of 190 pixels: those behind the 182nd are in no patch."""
    vision = SimpleNamespace(image_size=190, patch_size=14)
    config = SimpleNamespace(
        vision_config=vision, mm_spatial_pool_mode=mode, mm_spatial_pool_stride=2
    )
    pixels = torch.arange(190).expand(2, 3, 190, 190).to(torch.uint8)  # brighter to the right
    tokens = MediaTokens(2 * side**2, (side**2,) * 2, (side,) * 2)
    view = view_of(
        SimpleNamespace(model=SimpleNamespace(config=config)),  # type: ignore[arg-type]
        "video",
        {"pixel_values_videos": pixels[None]},
        tokens,
    )
    assert [unit.box[2] - unit.box[0] for unit in view.units] == [182, 182]
    patches = F.avg_pool2d(pixels.float(), 14).flatten(2).transpose(1, 2)
    pooled = pool_frames(patches, mode, stride=2)[..., 0].flatten()
    left = np.repeat([unit.box[0] for unit in view.units], side**2)
    middles = [(box[0] + box[2] - 1) / 2 for box in view.tokens] - left
    np.testing.assert_allclose(middles, pooled, atol=0.5)

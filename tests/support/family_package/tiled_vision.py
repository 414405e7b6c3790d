# SPDX-License-Identifier: Apache-2.0
"""The family of Command A Vision, as a package of somebody else's would bring it."""

from math import isqrt

from anchorprune_vllm.models.families.base import Family
from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.plan import MediaTokens


class CommandVision(Family):
    """An image is cut into square tiles, and a thumbnail is behind them."""

    @classmethod
    def units(cls, hf_config, modality, item, layout):
        vision = hf_config.vision_config
        side = vision.image_size // vision.patch_size // hf_config.downsample_factor
        tiles = layout.embeddings // side**2
        return MediaTokens(layout.embeddings, (side**2,) * tiles, (side,) * tiles)

    def tower_order(self, ratio):
        # Each token of the prompt is a square of the tower's own grid: 2 x 2, if ratio is 4.
        assert isqrt(ratio) ** 2 == ratio
        return TowerOrder("unit", "none", "raster", ratio)

# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL: most blocks of the vision tower see windows, in whose order its tokens lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from anchorprune_vllm.models.families.qwen import Qwen2
from anchorprune_vllm.models.general import generalize
from anchorprune_vllm.models.tower_order import TowerOrder


@dataclass(frozen=True)
class WindowOrder(TowerOrder):
    """Consecutive tokens become a row, and rows lie in the tower window by window."""

    visual: Any

    def _within(self, rows: int, columns: int) -> Tensor:
        in_tower = super()._within(rows, columns)
        side = self.visual.spatial_merge_size
        of_windows, _ = self.visual.get_window_index_thw(1, side * rows, side * columns)
        return in_tower[of_windows.argsort()]


class Qwen2_5(Qwen2):
    """What Qwen2.5-VL has that the others have not."""

    def tower_order(self, ratio: int) -> TowerOrder:
        model: Any = self
        return WindowOrder("unit", "none", "consecutive", ratio, model.visual)

    def _whole_blocks(self) -> Sequence[int]:
        model: Any = self
        return model.visual.fullatt_block_indexes


PrunedQwen = generalize(Qwen2_5_VLForConditionalGeneration, Qwen2_5)

# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL: most blocks of the vision tower see windows, in whose order its tokens lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from anchorprune_vllm.models.families.plain import Windowed
from anchorprune_vllm.models.families.qwen import Qwen2
from anchorprune_vllm.models.general import generalize


class Qwen2_5(Windowed, Qwen2):
    """What Qwen2.5-VL has that the others have not."""

    def _whole_blocks(self) -> Sequence[int]:
        model: Any = self
        return model.visual.fullatt_block_indexes


PrunedQwen = generalize(Qwen2_5_VLForConditionalGeneration, Qwen2_5, has_mrope=True)

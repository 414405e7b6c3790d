# SPDX-License-Identifier: Apache-2.0
"""Received attention against the vision tower that it is taken from: vLLM's Qwen2.5-VL.

The tower has an eighth of the 7B model's heads, each as large, and a quarter of its blocks: 7 with
windows, 1 with full attention. Of the whole tower's 4 with full attention, one is looked into too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from anchorprune_vllm.models.qwen2_5_vl import signals_behind_outputs
from anchorprune_vllm.signals.attention import received_attention
from anchorprune_vllm.tools.bench.support import edit_json, peak_bytes, side_by_side
from anchorprune_vllm.tools.demo_model import make_demo_model
from anchorprune_vllm.tools.local_model import LocalModel, one_rank


@dataclass(frozen=True)
class AttentionCost:
    """One call of the tower on a square picture, without and with importance."""

    tokens: int
    tower_ms: float
    with_importance_ms: float
    tower_mebibytes: float
    with_importance_mebibytes: float


def measure_received_attention(sides: Sequence[int], repeats: int) -> list[AttentionCost]:
    """For pictures of side x side visual tokens."""
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        make_demo_model(scratch / "model", arch="qwen2.5-vl")
        tower = {"hidden_size": 160, "num_heads": 2, "intermediate_size": 428, "depth": 8}
        config = scratch / "model" / "config.json"
        edit_json(config, vision_config={**tower, "fullatt_block_indexes": [7]})
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        with one_rank(scratch), torch.inference_mode():
            model = LocalModel(scratch / "model", load_format="dummy", dtype=dtype)
            return [_measure(model.model.visual, side, repeats) for side in sides]


def _measure(visual: torch.nn.Module, side: int, repeats: int) -> AttentionCost:
    grid = [[1, 2 * side, 2 * side]]  # a token is 2 x 2 patches
    pixels = torch.randint(256, (4 * side * side, 3 * 2 * 14 * 14), dtype=torch.uint8)

    def plain() -> None:
        visual(pixels, grid_thw=grid)

    def with_importance() -> None:
        with signals_behind_outputs(visual, {"importance"}):
            visual(pixels, grid_thw=grid)

    times = side_by_side([plain, with_importance], repeats)
    peaks = [peak_bytes(call) / 2**20 for call in (plain, with_importance)]
    return AttentionCost(side * side, *times, *peaks)


@dataclass(frozen=True)
class AttentionGrowth:
    """Received attention alone, for tokens that all attend to each other."""

    tokens: int
    milliseconds: float
    mebibytes: float


def measure_growth(lengths: Sequence[int], repeats: int) -> list[AttentionGrowth]:
    """With heads as large as the 7B model's, and an eighth of them, as above."""
    return [_measure_alone(tokens, repeats) for tokens in lengths]


def _measure_alone(tokens: int, repeats: int) -> AttentionGrowth:
    on_gpu = torch.cuda.is_available()
    query, key = torch.randn(2, tokens, 2, 80, device="cuda" if on_gpu else "cpu")
    if on_gpu:
        query, key = query.bfloat16(), key.bfloat16()

    def call() -> None:
        received_attention(query, key, [tokens], 80**-0.5)

    (spent,) = side_by_side([call], repeats)
    return AttentionGrowth(tokens, spent, peak_bytes(call) / 2**20)

# SPDX-License-Identifier: Apache-2.0
"""Received attention against the vision towers that it is taken from, which are vLLM's.

They have an eighth of the heads of the real ones, each as large, and a part of the blocks. Of the
blocks with full attention, only one is looked into, however many the real tower has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from anchorprune_vllm.commands.bench.support import edit_json, peak_bytes, side_by_side
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.signals.attention import received_attention
from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, one_rank


@dataclass(frozen=True)
class SmallTower:
    """A tower with a part of the blocks of the real one."""

    arch: str
    config: Mapping[str, Any]
    part: int
    """The real tower has so many times the blocks."""


TOWERS = (
    SmallTower(  # 7 of 28 blocks with windows, and 1 of 4 with full attention
        "qwen2.5-vl",
        {
            "hidden_size": 160,
            "num_heads": 2,
            "intermediate_size": 428,
            "depth": 8,
            "fullatt_block_indexes": [7],
        },
        part=4,
    ),
    SmallTower(  # 3 of 27 blocks, all with full attention
        "qwen3-vl",
        {"hidden_size": 144, "num_heads": 2, "intermediate_size": 538, "depth": 3},
        part=9,
    ),
)


@dataclass(frozen=True)
class AttentionCost:
    """One call of a tower on a square picture, without and with importance."""

    arch: str
    tokens: int
    tower_ms: float
    with_importance_ms: float
    tower_mebibytes: float
    with_importance_mebibytes: float
    part: int

    @property
    def share(self) -> float:
        """Of the real tower's time, computed: one block is looked into, however many there are."""
        return (self.with_importance_ms - self.tower_ms) / (self.part * self.tower_ms)


def measure_received_attention(
    tower: SmallTower, sides: Sequence[int], repeats: int
) -> list[AttentionCost]:
    """For pictures of side x side visual tokens."""
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        make_demo_model(scratch / "model", arch=tower.arch)
        edit_json(scratch / "model" / "config.json", vision_config=tower.config)
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        with one_rank(scratch), torch.inference_mode():
            loaded = LocalModel(scratch / "model", load_format="dummy", dtype=dtype)
            return [_measure(loaded.model, tower, side, repeats) for side in sides]


def _measure(model: Any, tower: SmallTower, side: int, repeats: int) -> AttentionCost:
    visual, signals = model.visual, model.tower_signals
    signals.order, signals.is_stated = model.tower_order(4), True  # a token is 2 x 2 patches
    tokens = MediaTokens(side * side, (side * side,), (side,))
    grid = [[1, 2 * side, 2 * side]]
    pixels = torch.randint(256, (4 * side * side, 3 * 2 * visual.patch_size**2), dtype=torch.uint8)

    def plain() -> None:
        visual(pixels, grid_thw=grid)

    def with_importance() -> None:
        with signals.tapped() as take:
            visual(pixels, grid_thw=grid)
            take([tokens])

    without_ms, with_ms = side_by_side([plain, with_importance], repeats)
    without_mib, with_mib = (peak_bytes(call) / 2**20 for call in (plain, with_importance))
    return AttentionCost(
        tower.arch, side * side, without_ms, with_ms, without_mib, with_mib, tower.part
    )


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

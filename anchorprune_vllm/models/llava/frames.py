# SPDX-License-Identifier: Apache-2.0
"""Frames of a video as tokens: pooled, in a line, with newline tokens among them.

The rules of the original LLaVA-Video code, LLaVA-VL's LLaVA-NeXT: `llava/model/llava_arch.py`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def pooled_side(side: int, mode: str, stride: int) -> int:
    """Tokens in a row of a pooled frame that has `side` patches in a row."""
    return math.ceil(side / stride) if mode == "bilinear" else side // stride


def pool_frames(frames: Tensor, mode: str, stride: int) -> Tensor:
    """Square frames of patches [F, P, C] to [F, N, C]."""
    side = math.isqrt(frames.shape[1])
    grid = frames.transpose(1, 2).unflatten(2, (side, side))  # [F, C, side, side]
    if mode == "average":
        pooled = F.avg_pool2d(grid, stride)
    elif mode == "max":
        pooled = F.max_pool2d(grid, stride)
    else:
        size = pooled_side(side, mode, stride)
        pooled = F.interpolate(grid, size=(size, size), mode="bilinear")
    return pooled.flatten(2).transpose(1, 2)


def newline_spacing(position: str, side: int) -> int | None:
    """Tokens behind which a newline follows, in frames of `side` x `side`; None: none inside."""
    return {"grid": side, "frame": side * side}.get(position)


def count_newlines(position: str, frames: int, side: int) -> int:
    """Newline tokens of a video."""
    return {"grid": frames * side, "frame": frames, "one_token": 1, "no_token": 0}[position]


def with_newlines(frames: Tensor, newline: Tensor, position: str) -> Tensor:
    """Tokens [F, N, H] of a video in a line, newlines [H] among them: [T, H]."""
    tokens = frames.flatten(0, 1)
    every = newline_spacing(position, math.isqrt(frames.shape[1]))
    if every is not None:
        lines = tokens.unflatten(0, (-1, every))
        return torch.cat([lines, newline.expand(len(lines), 1, -1)], dim=1).flatten(0, 1)
    return torch.cat([tokens, newline[None]]) if position == "one_token" else tokens


def unpruned_index_between_newlines(tokens: int, every: int | None) -> Tensor:
    """Where tokens stand in a line that has a newline behind `every` of them: [tokens] int64."""
    index = torch.arange(tokens)
    return index if every is None else index + index // every

# SPDX-License-Identifier: Apache-2.0
"""Pool the frames of a video and lay out their tokens, with newline tokens among them.

The rules are those of the original LLaVA-Video code, `llava/model/llava_arch.py` in LLaVA-NeXT of
LLaVA-VL.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def pooled_side(side: int, mode: str, stride: int) -> int:
    """Return the tokens in a row of a pooled frame that has `side` patches in a row."""
    return math.ceil(side / stride) if mode == "bilinear" else side // stride


def pool_frames(frames: Tensor, mode: str, stride: int) -> Tensor:
    """Pool square frames of patches [F, P, C] to tokens [F, N, C]."""
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
    """Return the number of tokens after which a newline follows, for frames of `side` x `side`.

    Returns None if there are no newlines inside a video.
    """
    return {"grid": side, "frame": side * side}.get(position)


def count_newlines(position: str, frames: int, side: int) -> int:
    """Return the number of newline tokens of a video."""
    return {"grid": frames * side, "frame": frames, "one_token": 1, "no_token": 0}[position]


def with_newlines(frames: Tensor, newline: Tensor, position: str) -> Tensor:
    """Return the tokens [F, N, H] of a video in sequence, with newlines [H] inserted: [T, H]."""
    tokens = frames.flatten(0, 1)
    every = newline_spacing(position, math.isqrt(frames.shape[1]))
    if every is not None:
        lines = tokens.unflatten(0, (-1, every))
        return torch.cat([lines, newline.expand(len(lines), 1, -1)], dim=1).flatten(0, 1)
    return torch.cat([tokens, newline[None]]) if position == "one_token" else tokens


def unpruned_index_between_newlines(tokens: int, every: int | None) -> Tensor:
    """Return the indices, int64 [tokens], of tokens with a newline after every `every` of them."""
    index = torch.arange(tokens)
    return index if every is None else index + index // every

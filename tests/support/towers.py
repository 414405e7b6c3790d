# SPDX-License-Identifier: Apache-2.0
"""Importance read from a vision tower in dense form, by loops."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention import MMEncoderAttention

from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.models.general.transformers_attention import TransformersAttention
from anchorprune_vllm.prompt_layout import PromptLayout


class Attention:
    """What goes into the last attention that a tower calls, in dense form."""

    def __init__(self, model: Any) -> None:
        self.calls: list[tuple[Any, Tensor, Tensor, Any, Any]] = []
        for module in model.modules():
            if isinstance(module, MMEncoderAttention | TransformersAttention):
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        query, key = args[:2] if args else (kwargs["query"], kwargs["key"])
        bounds = args[3] if len(args) > 3 else kwargs.get("cu_seqlens")
        self.calls.append((module, query, key, bounds, kwargs.get("attention_mask")))

    def received(self, from_first: bool) -> list[np.ndarray]:
        """Mean attention that each token gets within its part, a list of parts.

        From all tokens of the part, or from its first alone.
        """
        last = self.calls[-1][0]
        parts = []
        for module, query, key, bounds, mask in self.calls:
            if module is not last:
                continue
            size = module.head_size
            q = query.reshape(-1, module.num_heads, size).double()
            k = key.reshape(-1, module.num_kv_heads, size).double()
            if mask is not None:  # behind the tokens is padding
                is_real = mask[:, 0].any(1)
                q, k, lengths = q[is_real.flatten()], k[is_real.flatten()], is_real.sum(1).tolist()
            elif bounds is not None:
                lengths = bounds.diff().tolist()
            else:
                batch = query.shape[0] if query.ndim > 2 else 1
                lengths = [len(q) // batch] * batch
            for one, other in zip(q.split(lengths), k.split(lengths), strict=True):
                weights = torch.einsum("qhd,khd->hqk", one, other) * module.scale
                weights = weights.softmax(-1)[:, : 1 if from_first else None]
                parts.append(weights.mean((0, 1)).numpy())
        return parts


def importance_by_hand(
    parts: list[np.ndarray],
    order: TowerOrder,
    layout: PromptLayout,
    grids: Sequence[tuple[int, int]],
) -> np.ndarray:
    """Average what the tokens of each row received, by loops over rows and columns."""
    found: list[float] = []
    ratio, side = order.ratio, isqrt(order.ratio)
    cells = [grid for grid in grids if grid[0]]
    for part, (rows, columns) in zip(parts, cells, strict=True):
        tokens = part[1:] if order.class_token == "first" else part
        tokens = tokens[:-1] if order.class_token == "last" else tokens
        for row in range(rows):
            for column in range(columns):
                top, left, height, width = window_of(row, column, rows, columns, order.window)
                first = (top * columns + left * height) * ratio
                down, across = row - top, column - left
                if order.grouping == "consecutive":
                    members = [
                        first + (down * width + across) * ratio + each for each in range(ratio)
                    ]
                else:
                    members = [
                        first + (down * side + y) * width * side + across * side + x
                        for y in range(side)
                        for x in range(side)
                    ]
                found.append(float(np.mean([tokens[member] for member in members])))
    assert len(found) == layout.embeddings
    return np.array(found)


def window_of(
    row: int, column: int, rows: int, columns: int, window: int
) -> tuple[int, int, int, int]:
    """Return where the window of a cell begins, and how large it is; 0: all is one window."""
    if not window:
        return 0, 0, rows, columns
    top, left = row // window * window, column // window * window
    return top, left, min(window, rows - top), min(window, columns - left)

# SPDX-License-Identifier: Apache-2.0
"""The visual tokens of the things a question is about, for data that knows where these are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from anchorprune_vllm.commands.eval.vqa_data import Box
from anchorprune_vllm.selection import Candidates, KeptTokens


def tokens_on(boxes: Sequence[Box], grid: tuple[int, int]) -> Tensor:
    """Return which tokens [rows · columns] of a grid have their centre in any of the boxes."""
    rows, columns = grid
    y = ((torch.arange(rows) + 0.5) / rows)[:, None]
    x = ((torch.arange(columns) + 0.5) / columns)[None]
    on = torch.zeros(rows, columns, dtype=torch.bool)
    for left, top, right, bottom in boxes:
        on |= (left <= x) & (x < right) & (top <= y) & (y < bottom)
    return on.flatten()


def tell(model: nn.Module, boxes: Sequence[Box]) -> None:
    """Make a pruned model take 1 inside these boxes, and 0 elsewhere, for relevance.

    Without boxes it computes relevance again. Only for items of one unit.
    """
    pruner: Any = model._pruner
    if not isinstance(pruner._method.select, _ToldMethod):
        pruner._method = replace(pruner._method, select=_ToldMethod(pruner._method.select))
    pruner._method.select.boxes = boxes


class _ToldMethod:
    """A method whose items get their relevance from boxes."""

    def __init__(self, select: Any) -> None:
        self._select = select
        self.boxes: Sequence[Box] = ()

    def __call__(self, items: Sequence[Candidates]) -> list[KeptTokens]:
        return self._select([self._told(item) for item in items])

    def _told(self, item: Candidates) -> Candidates:
        if not self.boxes:
            return item
        (grid,) = item.grids
        return item._replace(relevance=tokens_on(self.boxes, grid).to(item.features))

# SPDX-License-Identifier: Apache-2.0
"""Find out which tokens of a vision tower make up which row of its output.

Between a tower's last attention and the rows that the language model gets, models merge 2 x 2
tokens, pool, shuffle or drop a class token. The attention that a token of the tower receives is
useful only if the token's row is known. So, once at load, the output of the last attention is
changed at single tokens, and the rows that change show the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from anchorprune_vllm.plan import MediaTokens

_ClassToken = Literal["none", "first", "last"]
_Grouping = Literal["consecutive", "raster"]
_WINDOWS = (0, 2, 4, 8, 16)
"""The sides of windows that are tried, in rows."""


@dataclass(frozen=True)
class TowerOrder:
    """The order in which the tokens of a tower's attention become rows.

    Tokens attend to each other within a part, which is a tile, a frame or a whole item.
    """

    part: int | Literal["unit", "item"]
    """The rows of a part: those of a unit, those of an item, or always the same number."""
    class_token: _ClassToken
    """The place of a token in each part that belongs to no row."""
    grouping: _Grouping
    """Whether the tokens of a row are consecutive, or form a square of the tower's own grid."""
    ratio: int
    """The number of tokens of each row."""
    window: int = 0
    """The side, in rows, of the square windows that the tower processes in turn; 0 for none."""

    @property
    def needs_grids(self) -> bool:
        """Return whether the order depends on the rows and columns of a unit."""
        has_squares = bool(self.window) or (self.grouping == "raster" and self.ratio > 1)
        return has_squares and self.part in ("unit", "item")

    def segments(self, media: Sequence[MediaTokens]) -> list[int]:
        """Return the number of the tower's tokens in each part."""
        extra = int(self.class_token != "none")
        return [
            self.ratio * sum(rows * columns for rows, columns in part) + extra
            for part in self._parts(media)
        ]

    def groups(self, media: Sequence[MediaTokens]) -> Tensor:
        """Return the tower's tokens that make up each row, as int64 [rows, ratio] on the CPU."""
        before, behind = int(self.class_token == "first"), int(self.class_token == "last")
        groups, start = [], 0
        for part in self._parts(media):
            start += before
            for rows, columns in part:
                groups.append(start + self._within(rows, columns))
                start += rows * columns * self.ratio
            start += behind
        return torch.cat(groups)

    def _parts(self, media: Sequence[MediaTokens]) -> list[list[tuple[int, int]]]:
        """Return the grids that each part consists of, as rows and columns."""
        grids = [[grid for grid in tokens.grids if grid[0]] for tokens in media]
        if self.part == "item":
            return grids
        units = [grid for item in grids for grid in item]
        if self.part == "unit":
            return [[grid] for grid in units]
        side = isqrt(self.part)
        tile = (side, side) if side * side == self.part else (1, self.part)
        return [[tile] for rows, columns in units for _ in range(rows * columns // self.part)]

    def _within(self, rows: int, columns: int) -> Tensor:
        """Return the tokens that make up each row of a grid, as int64 [rows * columns, ratio]."""
        windows = self._windows(rows, columns)
        groups, start = [], 0
        for window in windows:
            groups.append(start + self._grouped(*window.shape))
            start += window.numel() * self.ratio
        rows_by_window = torch.cat([window.flatten() for window in windows])
        return torch.cat(groups)[rows_by_window.argsort()]

    def _grouped(self, rows: int, columns: int) -> Tensor:
        number = torch.arange(rows * columns * self.ratio, device="cpu")
        if self.grouping == "consecutive":
            return number.view(-1, self.ratio)
        side = isqrt(self.ratio)
        squares = number.view(rows, side, columns, side).transpose(1, 2)
        return squares.reshape(-1, self.ratio)

    def _windows(self, rows: int, columns: int) -> list[Tensor]:
        """Return the row numbers in each window of a grid; windows at its edges may be smaller."""
        number = torch.arange(rows * columns, device="cpu").view(rows, columns)
        if not self.window:
            return [number]
        bands = number.split(self.window)
        return [square for band in bands for square in band.split(self.window, dim=1)]


def possible_orders(media: Sequence[MediaTokens], segments: Sequence[int]) -> list[TowerOrder]:
    """Return the orders that are possible, judging by the numbers of rows and tokens.

    `segments` are the numbers of tokens that attend to each other in the tower, part by part.
    """
    rows = sum(tokens.candidates for tokens in media)
    tile = rows // len(segments)
    found = []
    kinds = product(_WINDOWS, get_args(_ClassToken), get_args(_Grouping))
    for window, class_token, grouping in kinds:
        ratio = (sum(segments) - len(segments) * (class_token != "none")) // rows
        is_square = ratio > 1 and isqrt(ratio) ** 2 == ratio
        if ratio and (grouping == "consecutive" or is_square):
            parts: tuple[Any, ...] = ("unit", "item", tile)
            orders = [TowerOrder(part, class_token, grouping, ratio, window) for part in parts]
            found += [order for order in orders if order.segments(media) == list(segments)][:1]
    return found


def probe(
    orders: Sequence[TowerOrder],
    media: Sequence[MediaTokens],
    attention: nn.Module,
    run: Callable[[], Tensor],
) -> TowerOrder | None:
    """Return the order in which a tower's tokens become rows, or None if it is not in `orders`.

    Args:
        orders: The possible orders.
        media: The tokens of the items that `run` embeds.
        attention: The tower's last attention.
        run: Embeds the items and returns [rows, H], the same each time.
    """
    if not orders:
        return None
    unchanged = run()
    rows = {order: _rows_of_tokens(order, media) for order in orders}
    tokens = len(rows[orders[0]])
    left = list(orders)
    # Try a few tokens anywhere, and then those about which the remaining orders disagree.
    spread = [tokens // 3, tokens // 2, 2 * tokens // 3, tokens - 1]
    while left and (spread or len(left) > 1):
        if spread:
            token = spread.pop()
        else:
            unlike = (rows[left[0]] != rows[left[1]]).nonzero().flatten()
            if not len(unlike):  # both describe the same order
                del left[1]
                continue
            token = int(unlike[len(unlike) // 2])
        with _changed(attention, token):
            moved = (run() != unchanged).any(1).nonzero().flatten().tolist()
        left = [order for order in left if moved == _row(rows[order], token)]
    return left[0] if left else None


def _row(rows: Tensor, token: int) -> list[int]:
    """Return the row of a token as a list, which is empty if the token belongs to no row."""
    row = int(rows[token])
    return [row] if row >= 0 else []


def _rows_of_tokens(order: TowerOrder, media: Sequence[MediaTokens]) -> Tensor:
    """Return the row of each of the tower's tokens, as int64 [tokens]; -1 for no row."""
    groups = order.groups(media)
    rows = torch.full((sum(order.segments(media)),), -1, device="cpu")
    rows[groups] = torch.arange(len(groups), device="cpu")[:, None]
    return rows


class _changed:
    """A context manager that changes the output of an attention at one token."""

    def __init__(self, attention: nn.Module, token: int) -> None:
        self._attention, self._token, self._seen = attention, token, 0

    def __enter__(self) -> None:
        self._handle = self._attention.register_forward_hook(self._change)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _change(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        size = module.num_heads * module.head_size  # type: ignore[operator]
        flat = output.reshape(-1, size)  # type: ignore[arg-type]
        token = self._token - self._seen
        self._seen += len(flat)
        if not 0 <= token < len(flat):
            return output
        flat = flat.clone()
        flat[token] += 3 * flat.std()
        return flat.view(output.shape)

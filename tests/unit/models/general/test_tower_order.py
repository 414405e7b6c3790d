# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a tower make up a row: on towers that merge them in each known way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anchorprune_vllm.models.general.tower_order import TowerOrder, possible_orders, probe
from anchorprune_vllm.plan import MediaTokens

TILED = MediaTokens(32, (32,), (32,))  # two tiles of 4 x 4 rows, in one run of the prompt
FRAMES = MediaTokens(36, (12, 12, 12), (4, 4, 4))
IMAGE = MediaTokens(12, (12,), (4,))
WIDE = MediaTokens(70, (70,), (10,))


class Tower(nn.Module):
    """Tokens of one channel, which an attention leaves as they are, merged into rows."""

    def __init__(self, tokens: int, merge: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attention = nn.Identity()
        self.attention.num_heads, self.attention.head_size = 1, 2
        self._tokens = torch.randn(1, tokens, 2, generator=torch.Generator().manual_seed(0))
        self._merge = merge

    def forward(self) -> Tensor:
        return self._merge(self.attention(self._tokens)[0])


def consecutive(tokens: Tensor) -> Tensor:
    return tokens.unflatten(0, (-1, 4)).flatten(1)


def pooled(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    """2 x 2 of a raster, averaged."""

    def pool(tokens: Tensor) -> Tensor:
        grid = tokens.T.unflatten(1, (-1, 2 * rows, 2 * columns)).transpose(0, 1)
        return F.avg_pool2d(grid, 2).permute(0, 2, 3, 1).flatten(0, 2)

    return pool


def without_class_token(parts: int, place: int, merge: Callable[[Tensor], Tensor]) -> Callable:
    def drop(tokens: Tensor) -> Tensor:
        each = tokens.unflatten(0, (parts, -1))
        return merge((each[:, 1:] if place == 0 else each[:, :-1]).flatten(0, 1))

    return drop


def in_windows(rows: int, columns: int, window: int) -> Callable[[Tensor], Tensor]:
    """Four at a time, whose rows are put back from squares into a raster."""
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    walked = sorted(cells, key=lambda cell: (cell[0] // window, cell[1] // window, *cell))

    def merge(tokens: Tensor) -> Tensor:
        frames = consecutive(tokens).unflatten(0, (-1, len(cells)))
        return frames[:, [walked.index(cell) for cell in cells]].flatten(0, 1)

    return merge


def pooled_in_windows(rows: int, columns: int, window: int) -> Callable[[Tensor], Tensor]:
    """2 x 2 of each window's raster, averaged, and put back from windows into a raster."""
    cells = torch.arange(rows * columns).view(rows, columns)
    windows = [part for band in cells.split(window) for part in band.split(window, 1)]

    def merge(tokens: Tensor) -> Tensor:
        merged = torch.zeros(rows * columns, tokens.shape[1])
        for cells_of, part in zip(
            windows, tokens.split([4 * each.numel() for each in windows]), strict=True
        ):
            merged[cells_of.flatten()] = pooled(*cells_of.shape)(part)
        return merged

    return merge


CASES = [
    (IMAGE, [48], consecutive, TowerOrder("unit", "none", "consecutive", 4)),
    (IMAGE, [48], pooled(3, 4), TowerOrder("unit", "none", "raster", 4)),
    (FRAMES, [48] * 3, pooled(3, 4), TowerOrder("unit", "none", "raster", 4)),
    (FRAMES, [144], pooled(3, 4), TowerOrder("item", "none", "raster", 4)),
    (
        FRAMES,
        [49] * 3,
        without_class_token(3, 0, pooled(3, 4)),
        TowerOrder("unit", "first", "raster", 4),
    ),
    (
        FRAMES,
        [145],
        without_class_token(1, -1, consecutive),
        TowerOrder("item", "last", "consecutive", 4),
    ),
    (
        TILED,
        [65] * 2,
        without_class_token(2, 0, pooled(4, 4)),
        TowerOrder(16, "first", "raster", 4),
    ),
    (IMAGE, [48], in_windows(3, 4, 2), TowerOrder("unit", "none", "consecutive", 4, window=2)),
    (WIDE, [280], in_windows(7, 10, 4), TowerOrder("unit", "none", "consecutive", 4, window=4)),
    (FRAMES, [48] * 3, in_windows(3, 4, 2), TowerOrder("unit", "none", "consecutive", 4, window=2)),
    (WIDE, [280], pooled_in_windows(7, 10, 4), TowerOrder("unit", "none", "raster", 4, window=4)),
    (IMAGE, [12], lambda tokens: tokens, TowerOrder("unit", "none", "consecutive", 1)),
]


def found(
    media: MediaTokens, segments: Sequence[int], merge: Callable[[Tensor], Tensor]
) -> TowerOrder | None:
    tower = Tower(sum(segments), merge)
    orders = possible_orders([media], segments)
    return probe(orders, [media], tower.attention, tower)


def test_known_orders_are_found(subtests: pytest.Subtests) -> None:
    for media, segments, merge, order in CASES:
        with subtests.test(order=order):
            assert found(media, segments, merge) == order
            assert order.segments([media]) == segments


def test_scores_go_to_the_rows_of_their_tokens(subtests: pytest.Subtests) -> None:
    """Two items behind each other: a token's row is the one that the tower itself puts it in."""
    for media, segments, merge, order in CASES:
        with subtests.test(order=order):
            tokens = sum(segments)
            groups = order.groups([media, media])
            assert groups.shape == (2 * media.candidates, order.ratio)
            for token in range(0, tokens, 7):
                marked = torch.zeros(tokens, 2)
                marked[token] = 1
                rows = merge(marked).any(1).nonzero().flatten()
                holders = (groups == token).any(1).nonzero().flatten()
                assert holders.tolist() == rows.tolist()
                assert (groups == token + tokens).any(1).nonzero().flatten().tolist() == (
                    (rows + media.candidates).tolist()
                )


def shuffled(tokens: Tensor) -> Tensor:
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))
    return consecutive(tokens[order])


def mixed(tokens: Tensor) -> Tensor:
    """As a resampler does: each row sees all tokens."""
    return consecutive(tokens) + tokens.mean()


@pytest.mark.parametrize("merge", [shuffled, mixed])
def test_an_unknown_order_is_none(merge: Callable[[Tensor], Tensor]) -> None:
    assert found(IMAGE, [48], merge) is None


def test_no_order_has_such_numbers(subtests: pytest.Subtests) -> None:
    for segments in ([7], [24, 25], [50]):
        with subtests.test(segments=segments):
            assert possible_orders([IMAGE], segments) == []

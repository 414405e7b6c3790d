# SPDX-License-Identifier: Apache-2.0
"""How an anchor grows, token by token, on an example that can be followed by eye."""

from __future__ import annotations

import pytest
import torch

from anchorprune_vllm.anchor_params import AnchorParams
from anchorprune_vllm.selection.anchorprune import relevance_anchor
from anchorprune_vllm.selection.units import Unit

# By falling relevance: tokens 3, 2, 1, 0, 7, 6, 5, 4. Letters that differ are at right angles.
RELEVANCE = torch.tensor([5.0, 6, 7, 8, 1, 2, 3, 4])
LOOKS = dict(zip((3, 2, 1, 0, 7, 6, 5, 4), "aaabacda", strict=True))
FEATURES = torch.stack([torch.eye(4)["abcd".index(LOOKS[token])] for token in range(8)])


@pytest.mark.parametrize(
    ("maximum", "patience", "anchor", "novel"),
    [
        (8, 1, [3, 2, 1, 0], [0]),
        (8, 2, [3, 2, 1, 0, 7, 6], [0, 6]),
        (8, 3, [3, 2, 1, 0, 7, 6, 5], [0, 6, 5]),
        (8, 4, [3, 2, 1, 0, 7, 6, 5, 4], [0, 6, 5]),
        (5, 3, [3, 2, 1, 0, 7], [0]),
        (2, 3, [3, 2], []),
    ],
)
def test_walk(maximum: int, patience: int, anchor: list[int], novel: list[int]) -> None:
    unit = Unit(start=0, size=8, minimum=2, maximum=maximum)
    grown = relevance_anchor(RELEVANCE, FEATURES, unit, AnchorParams(patience=patience))
    assert grown.ranking[grown.is_kept].tolist() == anchor
    assert grown.ranking[grown.is_kept & grown.is_novel].tolist() == novel

# SPDX-License-Identifier: Apache-2.0
"""What all pruned models share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anchorprune_vllm.models import pruned
from anchorprune_vllm.models.linear_positions import LinearPositionsModel


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_split_over_ranks_are_summed(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Two ranks have half of the heads each, and go on with the sum of both."""
    calls: list[int] = []

    def all_reduce(summed: Tensor) -> Tensor:
        calls.append(1)
        return summed + torch.tensor([10.0, 0.0])

    monkeypatch.setattr(pruned, "tensor_model_parallel_all_reduce", all_reduce)
    attention = SimpleNamespace(num_heads=8 // ranks)
    mean = pruned.mean_over_heads(torch.tensor([2.0, 6.0]), attention, 8)
    assert mean.tolist() == ([0.25, 0.75] if ranks == 1 else [1.5, 0.75])
    assert len(calls) == ranks - 1


class LanguageModel:
    """Keeps what it is given."""

    def forward(self, input_ids: Any, positions: Tensor, *args: Any) -> Tensor:
        return positions


class Model(LinearPositionsModel, LanguageModel):
    def __init__(self, *, native: bool) -> None:
        self._native_positions = native
        self._max_model_len = 300
        text = SimpleNamespace(max_position_embeddings=100)
        self.config = SimpleNamespace(get_text_config=lambda: text)


def test_native_positions_stay_where_vllm_keeps_them() -> None:
    """CUDA graphs read them there; behind the last position of a scaled context there is none."""
    positions = torch.tensor([[5, 299, 450]]).repeat(3, 1)
    given = Model(native=True).forward(None, positions)
    assert given.tolist() == [5, 299, 299]
    assert given.data_ptr() == positions.data_ptr()
    assert Model(native=False).forward(None, positions) is positions

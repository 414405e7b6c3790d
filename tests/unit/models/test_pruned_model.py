# SPDX-License-Identifier: Apache-2.0
"""What all pruned models share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform

from anchorprune_vllm.models.linear_positions import LinearPositionsModel
from anchorprune_vllm.testing.local_model import LocalModel
from tests.support.second_runner import leave_scheduling


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


class TestSpeculation:
    """Drafts made on the device, with the scheduling that a GPU would have."""

    @pytest.fixture(autouse=True)
    def schedule_asynchronously(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = leave_scheduling(CpuPlatform.check_and_update_config)
        monkeypatch.setattr(CpuPlatform, "check_and_update_config", check)

    def load(self, model: Path, positions: str, **options: Any) -> Any:
        drafts = {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
        return LocalModel(
            model, settings={"positions": positions}, speculative_config=drafts, **options
        ).model

    def test_the_first_runner_refuses_native_positions(
        self, rank: None, demo_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        with pytest.raises(ValueError, match=r"first model runner.*give --no-async-scheduling, or"):
            self.load(demo_model, "native")
        assert self.load(demo_model, "native", async_scheduling=False)._native_positions
        assert not self.load(demo_model, "compact")._native_positions

    def test_the_second_runner_takes_them(
        self, rank: None, demo_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # which it needs to run
        assert self.load(demo_model, "native")._native_positions

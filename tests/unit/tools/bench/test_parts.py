# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch

from anchorprune_vllm.selection import select_batch
from anchorprune_vllm.tools.bench import attention, memory, selection, support, video


@pytest.mark.parametrize("units", [1, 3])
def test_it_compares_forms_of_the_same_method(units: int) -> None:
    torch.manual_seed(0)
    shape = selection.Shape("small", 96, 8, 12, 30, units)
    item = selection.random_candidates(shape, torch.device("cpu"))
    kept = select_batch([item], selection.PARAMS)[0].indices
    assert selection.straightforward(item).tolist() == kept.tolist()


def test_it_sees_the_highest_level_of_memory() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def call() -> None:
        first = torch.zeros(2**18, device=device)  # 1 MiB
        second = first + 1
        del first
        torch.zeros(2**17, device=device)
        del second

    assert support.peak_bytes(call) == pytest.approx(2 * 2**20, rel=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_it_measures_a_call_of_the_model() -> None:
    unpruned, pruned = memory.measure_peak_memory(["100%", 7])
    assert (unpruned.tokens, pruned.tokens) == (5 * 576 + 48, 7)
    assert 0 < pruned.mebibytes < 1.1 * unpruned.mebibytes


@pytest.mark.filterwarnings("ignore")
def test_it_looks_into_the_tower() -> None:
    (cost,) = attention.measure_received_attention([8], repeats=1)
    assert cost.tokens == 64
    assert cost.tower_ms > 0
    assert cost.with_importance_mebibytes > cost.tower_mebibytes > 0


def test_it_measures_a_video() -> None:
    (cost,) = video.measure_videos([2], kept=64, repeats=1)
    assert (cost.frames, cost.tokens, cost.kept) == (2, 2 * 13 * 14, 64)
    assert min(cost.unpruned_ms, cost.pruned_ms) > 0
    assert cost.pruned_mebibytes > cost.unpruned_mebibytes / 2 > 0


def test_it_measures_received_attention_alone() -> None:
    costs = attention.measure_growth([100, 12_000], repeats=1)
    assert [cost.tokens for cost in costs] == [100, 12_000]
    assert 0 < costs[0].milliseconds < costs[1].milliseconds
    assert costs[0].mebibytes <= costs[1].mebibytes < 12_000 * 12_000 * 4 / 2**20 / 10


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_it_sees_memory_of_the_whole_process(library: str) -> None:
    def call() -> None:
        torch.ones(2**24) if library == "torch" else np.ones(2**23)  # 64 MiB

    assert support.resident_peak_bytes(call) == pytest.approx(64 * 2**20, rel=0.2)


def test_memory_of_selection_grows_as_the_tokens_do() -> None:
    small, large = selection.measure_growth([2_000, 16_000], 1, torch.device("cpu"))
    assert (large.tokens, large.budget) == (16_000, 1_777)
    assert small.milliseconds < large.milliseconds
    assert 0 < large.mebibytes < 16_000 * 16_000 * 4 / 2**20 / 8
    assert large.mebibytes < 16 * small.mebibytes

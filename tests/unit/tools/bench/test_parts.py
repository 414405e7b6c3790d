# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from unittest.mock import ANY

import numpy as np
import pytest
import torch

from anchorprune_vllm.selection import select_batch
from anchorprune_vllm.tools.bench import attention, memory, parts, selection, support, video


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


def test_all_tables_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Selection and received attention in small, with stand-ins for what runs a tower."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(parts, "disable_progress_bar", lambda: None)  # it would be for all tests
    monkeypatch.setattr(parts, "SHAPES", [selection.Shape("small", 96, 8, 12, 30, units=3)])
    monkeypatch.setattr(parts, "_LENGTHS", (72, 144))
    monkeypatch.setattr(parts, "measure_steps", lambda *_: {"tower": 200.0, "step": 3.0})
    attended = attention.AttentionCost(64, 100.0, 110.0, 10.0, 20.0)
    monkeypatch.setattr(parts, "measure_received_attention", lambda *_, **__: [attended])
    seen = video.VideoCost(16, 2912, 512, 400.0, 500.0, 60.0, 90.0)
    monkeypatch.setattr(parts, "measure_videos", lambda *_: [seen])
    peaks = [memory.PeakMemory("100%", 2928, 80.0), memory.PeakMemory(640, 640, 60.0)]
    monkeypatch.setattr(parts, "measure_peak_memory", lambda *_: peaks)
    parts.run_parts(repeats=1)
    printed = capsys.readouterr().out
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    assert printed.count(f"({where})") == 8
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed.splitlines()
        if line.startswith("│")
    ]
    assert [row[:3] for row in rows if row[0] == "small"] == [["small", "96", "30"]]
    assert [row[:2] for row in rows if row[0] in ("72", "144")] == [
        *(["72", "8"], ["144", "16"]),  # selection: N and K
        *(["72", ANY], ["144", ANY]),  # received attention: N and its time
    ]
    assert [row[0] for row in rows if row[1] in ("32", "64", "128")] == ["5.6%", "11.1%", "22.2%"]
    for row in (
        ["step", "3.00 ms", "1.50%"],
        ["64", "100 ms", "110 ms (1.10x)", "10 MiB", "20 MiB (2.00x)"],
        ["16", "2912", "400 ms", "512", "500 ms (1.25x)", "60 MiB", "90 MiB (1.50x)"],
        ["640", "640", "60.0 MiB", "75.0%"],
    ):
        assert row in rows

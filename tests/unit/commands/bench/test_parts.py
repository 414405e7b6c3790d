# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from anchorprune_vllm.commands.bench import attention, memory, parts, selection, support, video
from anchorprune_vllm.models.general.tower_signals import TowerSignals
from anchorprune_vllm.selection import select_batch


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


class Meters:
    """Stand-ins for clock and memory: they run what is measured, and give numbers in a row."""

    def __init__(self) -> None:
        self.results: list[object] = []
        self._next = count(1)

    def side_by_side(self, calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
        assert repeats == 1
        self.results += [call() for call in calls]
        return [float(next(self._next)) for _ in calls]

    def peak_bytes(self, call: Callable[[], object]) -> int:
        self.results.append(call())
        return next(self._next) * 2**20


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> Meters:
    meters = Meters()
    for module in (attention, selection, video):
        monkeypatch.setattr(module, "side_by_side", meters.side_by_side)
    for module in (attention, memory, video):
        monkeypatch.setattr(module, "peak_bytes", meters.peak_bytes)
    monkeypatch.setattr(selection, "resident_peak_bytes", meters.peak_bytes)
    return meters


@pytest.mark.filterwarnings("ignore")
def test_it_measures_a_call_of_the_model(meters: Meters) -> None:
    found = memory.measure_peak_memory(["100%", 7], tower_width=128, text_width=256)
    assert found == [
        memory.PeakMemory("100%", 5 * 576 + 48, 1.0),
        memory.PeakMemory(7, 7, 2.0),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tower", attention.TOWERS, ids=lambda tower: tower.arch)
def test_it_looks_into_the_tower(
    meters: Meters, monkeypatch: pytest.MonkeyPatch, tower: attention.SmallTower
) -> None:
    looked: list[list[int]] = []
    take = TowerSignals._signals

    def looking(*args: Any) -> Any:
        found = take(*args)
        looked.append([len(part) for part in found.values()])
        return found

    monkeypatch.setattr(TowerSignals, "_signals", looking)
    (cost,) = attention.measure_received_attention(tower, [8], repeats=1)
    assert cost == attention.AttentionCost(tower.arch, 64, 1.0, 2.0, 3.0, 4.0, tower.part)
    assert looked == [[64], [64]]  # in two of four calls
    assert cost.share == 1 / tower.part


def test_it_measures_a_video(meters: Meters) -> None:
    (cost,) = video.measure_videos([2], kept=64, repeats=1)
    assert cost == video.VideoCost(2, 2 * 13 * 14, 64, 1.0, 2.0, 3.0, 4.0)
    assert [len(rows) for (rows,) in meters.results] == [2 * 13 * 14, 64] * 2


def test_it_measures_received_attention_alone(meters: Meters) -> None:
    costs = attention.measure_growth([100, 1_200], repeats=1)
    assert costs == [
        attention.AttentionGrowth(100, 1.0, 2.0),
        attention.AttentionGrowth(1_200, 3.0, 4.0),
    ]


def test_it_measures_how_selection_grows(meters: Meters) -> None:
    costs = selection.measure_growth([200, 1_600], 1, torch.device("cpu"))
    assert costs == [
        selection.SelectionGrowth(200, 22, 1.0, 2.0),
        selection.SelectionGrowth(1_600, 177, 3.0, 4.0),
    ]
    assert [len(kept.indices) for (kept,) in meters.results] == [22, 22, 177, 177]


def test_times_are_medians_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(support, "time", SimpleNamespace(perf_counter=lambda: now))

    def take(name: str, seconds: Iterator[int]) -> None:
        nonlocal now
        turns.append(name)
        now += next(seconds)

    turns: list[str] = []
    one, other = iter([100, 1, 9, 2]), iter([100, 3, 3, 7])  # the first of each is not counted
    found = support.side_by_side([lambda: take("a", one), lambda: take("b", other)], repeats=3)
    assert found == [2000.0, 3000.0]
    assert "".join(turns) == "abababab"


def test_memory_of_the_whole_process_is_the_peak_above_what_was_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = {"VmRSS": 700, "VmHWM": 700}
    monkeypatch.setattr(support, "_process_bytes", process.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert support.resident_peak_bytes(lambda: process.update(VmRSS=720, VmHWM=950)) == 250


def test_memory_of_the_whole_process_is_what_linux_says() -> None:
    assert 0 < support._process_bytes("VmRSS") <= support._process_bytes("VmHWM")


AUTHORS = """
from dataclasses import dataclass

@dataclass
class AnchorPruneConfig:
    k_total: int
    k_min: int

def anchorprune_select(relevance, features, importance, config, expansion_features):
    assert config.k_min == 1 and len(relevance) == len(features) == len(expansion_features)
    return importance.topk(config.k_total).indices.sort().values, None
"""


def test_the_authors_selector_is_taken_from_a_clone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a clone of"):
        selection.authors_selector(tmp_path)
    (tmp_path / "anchorprune").mkdir()
    (tmp_path / "anchorprune" / "selection.py").write_text(AUTHORS)
    item = selection.random_candidates(selection.Shape("", 64, 8, 8, 12), torch.device("cpu"))
    kept = selection.authors_selector(tmp_path)(item)
    assert kept.tolist() == sorted(item.importance.argsort(descending=True)[:12].tolist())


def test_all_tables_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Selection and received attention in small, with stand-ins for what runs a tower."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(parts, "disable_progress_bar", lambda: None)  # it would be for all tests
    monkeypatch.setattr(parts, "SHAPES", [selection.Shape("small", 96, 8, 12, 30, units=3)])
    monkeypatch.setattr(parts, "_LENGTHS", (72, 144))
    monkeypatch.setattr(parts, "measure_steps", lambda *_: {"tower": 200.0, "step": 3.0})
    attended = attention.AttentionCost("qwen3-vl", 1024, 100.0, 110.0, 10.0, 20.0, 9)
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
        ["qwen3-vl", "1024", "100 ms", "110 ms (1.10x)", "1.1%", "10 MiB", "20 MiB (2.00x)"],
        ["16", "2912", "400 ms", "512", "500 ms (1.25x)", "60 MiB", "90 MiB (1.50x)"],
        ["640", "640", "60.0 MiB", "75.0%"],
    ):
        assert row in rows


def test_one_table_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "disable_progress_bar", lambda: None)  # it would be for all tests
    monkeypatch.setattr(parts, "_LENGTHS", (72,))
    parts.run_parts(repeats=1, only="received attention alone")
    printed = capsys.readouterr().out
    assert printed.count("┏") == 1
    assert "Received attention alone" in printed
    with pytest.raises(ValueError, match="'attention' is not one of selection, growth of"):
        parts.run_parts(repeats=1, only="attention")

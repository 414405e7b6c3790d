# SPDX-License-Identifier: Apache-2.0
"""What the tables of `bench parts` show: with stand-ins for clock and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from rich.table import Table

from anchorprune_vllm.commands.bench import parts, towers
from anchorprune_vllm.commands.bench.choices import Choice
from anchorprune_vllm.models.general.tower_signals import TowerSignals
from anchorprune_vllm.selection import AnchorParams, select_batch


def rows_of(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


@pytest.mark.parametrize("units", [1, 3])
def test_the_loop_is_the_same_method(units: int) -> None:
    torch.manual_seed(0)
    (item,) = Choice("small", 96, 30, 8, 12, units=units).candidates("cpu", torch.float32)
    kept = select_batch([item], AnchorParams())[0].indices
    assert parts.straightforward(item).tolist() == kept.tolist()


class Meters:
    """Run what is measured, and give 1 ms or MiB, 2, 3 and so on as results."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self._next = count(1)

    def time_in_turns(self, calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
        assert repeats == 1
        self.results += [call() for call in calls]
        return [float(next(self._next)) for _ in calls]

    def peak_bytes(self, call: Callable[[], object]) -> int:
        self.results.append(call())
        return next(self._next) * 2**20


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> Meters:
    meters = Meters()
    for module in (parts, towers):
        monkeypatch.setattr(module, "time_in_turns", meters.time_in_turns)
    monkeypatch.setattr(towers, "peak_bytes", meters.peak_bytes)
    monkeypatch.setattr(parts, "resident_peak_bytes", meters.peak_bytes)
    return meters


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", towers.SMALL_TOWERS)
def test_received_attention(meters: Meters, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    read: list[list[int]] = []
    take = TowerSignals._signals

    def reading(*args: Any) -> Any:
        found = take(*args)
        read.append([len(part) for part in found.values()])
        return found

    monkeypatch.setattr(TowerSignals, "_signals", reading)
    monkeypatch.setattr(towers, "SMALL_TOWERS", {arch: towers.SMALL_TOWERS[arch]})
    monkeypatch.setattr(towers, "_SIDES", (8,))
    share = f"{1 / towers.SMALL_TOWERS[arch][1]:.1%}"
    assert rows_of(towers.received_attention_table()) == [
        (arch, "64", "1 ms", "2 ms (2.00x)", share, "3 MiB", "4 MiB (1.33x)")
    ]
    assert read == [[64], [64]]  # in two of four calls


def test_videos(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(towers, "_FRAMES", (4,))
    assert rows_of(towers.videos_table(repeats=1)) == [
        ("4", "100%", str(4 * 13 * 14), "1 ms", "1.00x", "3.0 MiB", "100.0%"),
        ("4", "512", "512", "2 ms", "2.00x", "4.0 MiB", "133.3%"),
    ]


@pytest.mark.filterwarnings("ignore")
def test_peak_memory(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(towers, "_NEXT_WIDTHS", (128, 256))
    assert rows_of(towers.peak_memory_table(repeats=1)) == [
        ("672x672", "100%", str(5 * 576 + 48), "1 ms", "1.00x", "5.0 MiB", "100.0%"),
        ("672x672", "640", "640", "2 ms", "2.00x", "6.0 MiB", "120.0%"),
        ("672x672", "320", "320", "3 ms", "3.00x", "7.0 MiB", "140.0%"),
        ("672x672", "160", "160", "4 ms", "4.00x", "8.0 MiB", "160.0%"),
    ]


def test_received_attention_alone(meters: Meters) -> None:
    assert rows_of(towers.attention_growth_table((100, 1_000), repeats=1)) == [
        ("100", "1.0 ms", "100.00 ns", "2.0 MiB", "20.48 KiB"),
        ("1000", "3.0 ms", "3.00 ns", "4.0 MiB", "4.10 KiB"),
    ]


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
        parts.authors_selector(tmp_path)
    (tmp_path / "anchorprune").mkdir()
    (tmp_path / "anchorprune" / "selection.py").write_text(AUTHORS)
    (item,) = Choice("", 64, 12, 8, 8).candidates("cpu", torch.float32)
    kept = parts.authors_selector(tmp_path)(item)
    assert kept.tolist() == sorted(item.importance.argsort(descending=True)[:12].tolist())


def test_all_tables_are_printed(
    meters: Meters, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Selection and received attention in small, with stand-ins for what runs a tower."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(parts, "disable_progress_bar", lambda: None)  # it would be for all tests
    monkeypatch.setattr(parts, "_CHOICES", [Choice("small", 96, 30, 8, 12, units=3)])
    monkeypatch.setattr(parts, "_LENGTHS", (72, 144))
    monkeypatch.setattr(towers, "received_attention_table", lambda: Table("a" * 40, title="towers"))
    monkeypatch.setattr(parts, "_steps", lambda repeats: Table("a" * 40, title="steps"))
    monkeypatch.setattr(towers, "videos_table", lambda repeats: Table("a" * 40, title="videos"))
    monkeypatch.setattr(towers, "peak_memory_table", lambda repeats: Table("a" * 40, title="peak"))
    parts.run_parts(repeats=1)
    printed = capsys.readouterr().out
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    titles = ["steps", "towers", "videos", "peak", "Selection of one token in nine"]
    assert all(f"{title} ({where})" in printed for title in titles)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed.splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        ["small", "96", "30", "1.0 ms", "2.0 ms (2.00x)"],
        ["72", "8", "3.0 ms", ANY, "4.0 MiB", ANY],
        ["144", "16", "5.0 ms", ANY, "6.0 MiB", ANY],
        ["5.6%", "32", "7.0 ms", "160", "8.0 ms", "1.1x"],
        ["11.1%", "64", "9.0 ms", "320", "10.0 ms", "1.1x"],
        ["22.2%", "128", "11.0 ms", "640", "12.0 ms", "1.1x"],
        ["72", "13.0 ms", ANY, "14.0 MiB", ANY],
        ["144", "15.0 ms", ANY, "16.0 MiB", ANY],
    ]


def test_one_table_alone(
    meters: Meters, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "disable_progress_bar", lambda: None)
    monkeypatch.setattr(parts, "_LENGTHS", (72,))
    parts.run_parts(repeats=1, only="received attention alone")
    assert capsys.readouterr().out.count("Received attention alone") == 1
    assert len(meters.results) == 2  # a time and a peak
    with pytest.raises(ValueError, match="'attention' is not one of selection, growth of"):
        parts.run_parts(repeats=1, only="attention")


def test_steps_are_shares_of_the_tower(meters: Meters) -> None:
    times = [row[1:] for row in rows_of(parts._steps(repeats=1))]
    assert times == [("1.00 ms", "100.00%"), ("2.00 ms", "200.00%"), ("3.00 ms", "300.00%")]

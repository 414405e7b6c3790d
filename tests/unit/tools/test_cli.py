# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from anchorprune_vllm.selection import select_batch
from anchorprune_vllm.tools import (
    bench_attention,
    bench_memory,
    bench_selection,
    bench_support,
    bench_video,
)
from anchorprune_vllm.tools.cli import main
from anchorprune_vllm.tools.demo_model import ARCHITECTURES


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_demo_model(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo-model", str(tmp_path / "model"), "--arch", arch]) == 0
    assert "144 visual tokens per" in capsys.readouterr().out
    assert json.loads((tmp_path / "model" / "demo_model.json").read_text())["arch"] == arch


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").touch()
    assert main(["demo-model", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("anchorprune: error: ")
    assert "is not a demo model" in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["demo", "--images", "0"], "'0' is not a whole number of at least 1"),
        (["demo", "--budgets", "16,x"], "Budget 'x' is not allowed"),
        (["demo-model", "d", "--arch", "x"], f"--arch {{trained,{','.join(ARCHITECTURES)}}}]"),
        (["bench", "--repeats", "-1"], "is not a whole number of at least 1"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_arguments(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(args)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("units", [1, 3])
def test_bench_compares_forms_of_the_same_method(units: int) -> None:
    torch.manual_seed(0)
    shape = bench_selection.Shape("small", 96, 8, 12, 30, units)
    item = bench_selection.random_candidates(shape, torch.device("cpu"))
    kept = select_batch([item], bench_selection.PARAMS)[0].indices
    assert bench_selection.straightforward(item).tolist() == kept.tolist()


def test_bench_sees_the_highest_level_of_memory() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def call() -> None:
        first = torch.zeros(2**18, device=device)  # 1 MiB
        second = first + 1
        del first
        torch.zeros(2**17, device=device)
        del second

    assert bench_support.peak_bytes(call) == pytest.approx(2 * 2**20, rel=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_bench_measures_a_call_of_the_model() -> None:
    unpruned, pruned = bench_memory.measure_peak_memory(["100%", 7])
    assert (unpruned.tokens, pruned.tokens) == (5 * 576 + 48, 7)
    assert 0 < pruned.mebibytes < 1.1 * unpruned.mebibytes


@pytest.mark.filterwarnings("ignore")
def test_bench_looks_into_the_tower() -> None:
    (cost,) = bench_attention.measure_received_attention([8], repeats=1)
    assert cost.tokens == 64
    assert cost.tower_ms > 0
    assert cost.with_importance_mebibytes > cost.tower_mebibytes > 0


def test_bench_measures_received_attention_alone() -> None:
    costs = bench_attention.measure_growth([100, 12_000], repeats=1)
    assert [cost.tokens for cost in costs] == [100, 12_000]
    assert 0 < costs[0].milliseconds < costs[1].milliseconds
    assert costs[0].mebibytes <= costs[1].mebibytes < 12_000 * 12_000 * 4 / 2**20 / 10


def test_bench_measures_a_video() -> None:
    (cost,) = bench_video.measure_videos([2], kept=64, repeats=1)
    assert (cost.frames, cost.tokens, cost.kept) == (2, 2 * 13 * 14, 64)
    assert min(cost.unpruned_ms, cost.pruned_ms) > 0
    assert cost.pruned_mebibytes > cost.unpruned_mebibytes / 2 > 0

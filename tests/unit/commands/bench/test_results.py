# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from anchorprune_vllm.commands.bench import report
from anchorprune_vllm.commands.bench.contenders import FREE, UNPRUNED, Contender
from anchorprune_vllm.commands.bench.load import ClientResult
from anchorprune_vllm.commands.bench.results import Measurement, ServeResults

PLAIN, FREE_64, OURS_64 = Contender(UNPRUNED), Contender(FREE, "64"), Contender("anchorprune", "64")
SETTINGS = {"model": "m", "load": {"requests": 4}}


def none_yet(**settings: object) -> ServeResults:
    return ServeResults(settings=SETTINGS | settings, commands=[], measurements=[])


def measured(
    contender: Contender,
    concurrency: int = 1,
    round: int = 0,
    *,
    ttft: float = 100,
    throughput: float = 2,
) -> Measurement:
    client = dict.fromkeys(ClientResult.model_fields, 1) | {
        "completed": 4,
        "total_input_tokens": 400,
        "total_output_tokens": 80,
        "median_ttft_ms": ttft,
        "p99_ttft_ms": 3 * ttft,
        "request_throughput": throughput,
        "median_tpot_ms": 7.5,
    }
    return Measurement(
        contender=contender,
        concurrency=concurrency,
        round=round,
        client=ClientResult.model_validate(client),
        kv_tokens=6000,
        embedding_seconds=0.5,
        selection_seconds=0.1,
        memory_bytes=3 * 2**30,
    )


@pytest.fixture
def results(tmp_path: Path) -> ServeResults:
    measurements = [
        *(measured(PLAIN, round=n, ttft=ttft) for n, ttft in enumerate((100, 140, 90))),
        measured(FREE_64, ttft=20, throughput=10),
        measured(OURS_64, ttft=25, throughput=9),
        measured(PLAIN, 8, throughput=3),
    ]
    found = ServeResults(settings=SETTINGS, commands=["me"], measurements=measurements)
    found.save(tmp_path / "results.json")
    return found


def test_figures_of_a_measurement() -> None:
    one = measured(PLAIN)
    assert one.prompt_tokens == 100
    assert one.room == 6000 / 120
    assert one.encoder_ms == pytest.approx(100)  # half a second but a tenth, for four requests
    assert one.selection_ms == pytest.approx(25)


def test_speed_up_and_what_free_selection_reaches(results: ServeResults) -> None:
    ttft, throughput = "client.median_ttft_ms", "client.request_throughput"
    assert results.median(PLAIN, 1, ttft) == 100
    assert results.speed_up(OURS_64, 1, ttft) == 4
    assert results.speed_up(FREE_64, 1, ttft) == 5
    assert results.speed_up(OURS_64, 1, ttft, over=FREE) == pytest.approx(0.8)
    assert results.speed_up(OURS_64, 1, throughput) == 4.5
    assert results.speed_up(OURS_64, 1, throughput, over=FREE) == pytest.approx(0.9)
    assert results.speed_up(OURS_64, 8, ttft) is None
    other = Contender("anchorprune", "32")
    assert results.speed_up(other, 1, ttft, over=FREE) is None


def test_they_come_back_and_are_not_measured_again(results: ServeResults, tmp_path: Path) -> None:
    again = none_yet().continued(tmp_path / "results.json")
    assert again == results
    assert (PLAIN, 1, 2) in again
    assert (PLAIN, 1, 3) not in again
    assert (OURS_64, 8, 0) not in again


def test_other_settings_are_refused(results: ServeResults, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"of other settings \(model 'm', now 'n'\): give"):
        none_yet(model="n").continued(tmp_path / "results.json")


@pytest.mark.parametrize(
    "text", ["", "{}", '{"settings": {}, "commands": [], "measurements": [1]}']
)
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match="cannot read the results in"):
        none_yet().continued(tmp_path / "results.json")


def cells(table: str, method: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith(f"| {method} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_table(results: ServeResults) -> None:
    text = report.as_markdown(results, "a model", ["a note"], lambda tokens: (2e12, tokens * 1e10))
    assert text.startswith("# a model\n- a note\n\n## 1 request at once, median of 3 rounds\n")
    assert "## 8 requests at once, one round\n" in text
    ours, not_measured, as_paper = cells(text, "anchorprune")
    assert ours[1:5] == ["64", "100", "25", "75"]
    assert ours[7:11] == ["50", "100", "25.0", "3.00"]
    assert ours[11:] == ["4.00x", "4.50x", "80.0%", "90.0%"]
    assert set(not_measured[2:]) == {"–"}
    assert as_paper[1:] == ["64", "1", "2", "25.0", "7.5", "3.22"]
    (free, *_) = cells(text, FREE)
    assert free[11:] == ["5.00x", "5.00x", "–", "–"]
    (plain, *_) = cells(text, UNPRUNED)
    assert plain[1:4] == ["all", "100", "100"]


def test_without_a_formula_there_are_no_flops(results: ServeResults) -> None:
    as_paper = cells(report.as_markdown(results, "a model", []), "anchorprune")[-1]
    assert as_paper[2:4] == ["–", "–"]


def test_files(results: ServeResults, tmp_path: Path) -> None:
    report.write_report(results, tmp_path, "a model", [], None)
    for name in ("budget.png", "concurrency.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "table.md").read_text().startswith("# a model")
    assert len(json.loads((tmp_path / "results.json").read_text())["measurements"]) == 6

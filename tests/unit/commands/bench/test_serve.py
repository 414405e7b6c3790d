# SPDX-License-Identifier: Apache-2.0
"""Which servers are started, in which order, and what is kept: with stand-ins for both sides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from anchorprune_vllm.commands.bench import probes, report, serve
from anchorprune_vllm.commands.bench.load import ClientResult, Load
from anchorprune_vllm.commands.bench.probes import StageTimes
from anchorprune_vllm.commands.bench.serve import ServeComparison, flops_of, run_serve
from anchorprune_vllm.commands.bench.served import ServedModel
from anchorprune_vllm.commands.bench.shapes import MediaSize
from anchorprune_vllm.commands.chosen_methods import ChosenMethod


class Model:
    """Of a server, it notes the flags that it is started with, and whether it is stopped."""

    name, path, media, text_encoder, notes = "m", "/m", MediaSize(8, 8), None, ()
    flags = ("--dtype", "float32")

    def __init__(self) -> None:
        self.started: list[str] = []
        self.running = 0

    @contextmanager
    def serve(self, flags: list[str], log: Path) -> Iterator[SimpleNamespace]:
        self.started.append(" ".join(flags[1::2]) or "unpruned")
        self.running += 1
        try:
            yield SimpleNamespace(pid=0)
        finally:
            self.running -= 1


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    found = Model()
    found.loads = []
    spent = iter(range(1000))

    def put_on(load, server, path, concurrency, round_, out):
        if len(found.loads) == found.fails_at:
            raise KeyboardInterrupt
        found.loads.append(out.name)
        count = load.requests_at(concurrency)
        figures = dict.fromkeys(ClientResult.model_fields, 1)
        return ClientResult(**figures | {"completed": count, "total_input_tokens": 10 * count})

    found.fails_at = None
    monkeypatch.setattr(Load, "put_on", put_on)
    monkeypatch.setattr(serve, "flops_of", lambda model, load: None)
    monkeypatch.setattr(
        probes,
        "read_times",
        lambda server: StageTimes(embedding_seconds=4.0 * next(spent), selection_seconds=1.0),
    )
    monkeypatch.setattr(probes, "read_kv_tokens", lambda s: 1000)
    monkeypatch.setattr(probes, "host_bytes", lambda pid: 2**30)
    return found


@pytest.fixture
def wanted(model: Model, tmp_path: Path) -> ServeComparison:
    load = Load(model.media, None, 4, 2, 3, [1, 4])
    return ServeComparison(model, [ChosenMethod("anchorprune")], ["8"], tmp_path, "me", load)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: a report is written after each measurement, and plots take most of the time."""
    monkeypatch.setattr(report, "_plot_budgets", lambda results, path: None)
    monkeypatch.setattr(report, "_plot_concurrencies", lambda results, path: None)


UNPRUNED, FREE, OURS = "unpruned", "8 first", "8 anchorprune"


def test_all_are_measured_under_each_load(
    model: Model, wanted: ServeComparison, tmp_path: Path
) -> None:
    results = run_serve(wanted)
    assert model.started == [UNPRUNED, FREE, OURS]
    assert model.loads == [
        *("unpruned-0-1", "unpruned-0-4", "free-selection-8-0-1", "free-selection-8-0-4"),
        *("anchorprune-8-0-1", "anchorprune-8-0-4"),
    ]
    assert model.running == 0
    assert len(results.measurements) == 6
    assert {m.embedding_seconds for m in results.measurements} == {4.0}  # what one load took
    assert {m.selection_seconds for m in results.measurements} == {0.0}
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("# m\n- `me`\n- machine: ")
    assert "3 requests 1 at once, 8 requests 4 at once" in table
    assert {plot.name for plot in tmp_path.glob("*.png")} == {"budget.png", "concurrency.png"}


@pytest.mark.usefixtures("no_plots")
def test_each_round_begins_with_another(model: Model, wanted: ServeComparison) -> None:
    run_serve(replace(wanted, rounds=3, load=replace(wanted.load, concurrencies=[1])))
    assert model.started == [UNPRUNED, FREE, OURS, FREE, OURS, UNPRUNED, OURS, UNPRUNED, FREE]


@pytest.mark.usefixtures("no_plots")
def test_it_goes_on_where_it_was_stopped(model: Model, wanted: ServeComparison) -> None:
    model.fails_at = 3
    with pytest.raises(KeyboardInterrupt):
        run_serve(wanted)
    assert model.running == 0  # the server is stopped too
    model.fails_at = None
    model.started.clear()
    model.loads.clear()
    run_serve(wanted)
    assert model.started == [FREE, OURS]
    assert model.loads == ["free-selection-8-0-4", "anchorprune-8-0-1", "anchorprune-8-0-4"]
    model.started.clear()
    run_serve(wanted)
    assert model.started == []
    run_serve(replace(wanted, budgets=["8", "16"]))
    assert model.started == ["16 first", "16 anchorprune"]


@pytest.mark.usefixtures("no_plots")
def test_what_is_wrong_is_found_before_a_server_starts(
    model: Model, wanted: ServeComparison, tmp_path: Path
) -> None:
    run_serve(wanted)
    model.started.clear()
    resized = copy(model)
    resized.notes = ["scale 2: other sizes"]
    for change, words in (
        ({"load": replace(wanted.load, data=tmp_path / "none.jsonl")}, "there is no file"),
        ({"load": replace(wanted.load, output_tokens=9)}, "are of other settings"),
        ({"with_vllm": True}, "knows shares alone"),
        ({"model": resized}, "are of other settings"),
    ):
        with pytest.raises(ValueError, match=words):
            run_serve(replace(wanted, **change))
    assert model.started == []
    stored = json.loads((tmp_path / "results.json").read_text())
    assert len(stored["measurements"]) == 6


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    ("media", "words"),
    [
        (MediaSize(8, 6), "4 random words' tokens and a 8x6 image"),
        (MediaSize(8, 6, 3), "a 8x6x3 video"),
    ],
)
def test_the_report_says_what_was_asked_about(
    wanted: ServeComparison, tmp_path: Path, media: MediaSize, words: str
) -> None:
    run_serve(replace(wanted, load=replace(wanted.load, media=media, concurrencies=[1])))
    assert words in (tmp_path / "table.md").read_text()


def test_operations_of_the_tower_are_those_of_the_media(demo_model: Path, tmp_path: Path) -> None:
    load = Load(MediaSize(336, 336), None, 4, 2, 3, [1])
    model = ServedModel("m", str(demo_model), load.media, None, ())
    tower, prefill = flops_of(model, load)(100)
    assert tower is not None
    assert tower > 0
    # Pictures of a file have any size.
    assert flops_of(model, replace(load, data=tmp_path / "data.jsonl"))(100) == (None, prefill)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from anchorprune_vllm.commands.eval import report
from anchorprune_vllm.commands.eval.data import DataSet
from anchorprune_vllm.commands.eval.results import EvalResults, Run
from anchorprune_vllm.commands.eval.vqa_data import Picture, Question


def data_set(name: str, *kinds: str) -> DataSet:
    questions = tuple(Question("?", ("a",), kind) for kind in kinds)
    return DataSet(name, (Picture(Image.Image, questions),))


ONE = data_set("one", "yes/no", "a|b")
TWO = data_set("two", "all")


def run(method: str, accuracy: float, *where: str | None, data: DataSet = ONE) -> Run:
    """`where`: positions, query, budget. The interval is from 0.02 below to 0.04 above."""
    positions, query, budget = where or (None, None, None)
    return Run(
        *(method, positions, query, budget, data.name),
        accuracy=accuracy,
        interval=(accuracy - 0.02, accuracy + 0.04),
        kinds=dict.fromkeys(data.kind_of, accuracy),
        prompt_tokens=20.0,
    )


def results(tmp_path: Path, *runs: Run, data: tuple[DataSet, ...] = (ONE,)) -> EvalResults:
    made = EvalResults.open(tmp_path, {"model": "some/model"}, data)
    made.runs += runs
    return made


def test_rows_are_grouped_and_ordered(tmp_path: Path) -> None:
    made = results(
        tmp_path,
        run("blind", 0.4),
        run("Full", 0.8),
        run("m", 0.6, "native", "turn", "22.2%"),
        run("m", 0.5, "native", "turn", "5.6%"),
        run("m", 0.55, "native", "turn", "64"),
        run("n", 0.7, "native", "turn", "5.6%"),
        run("m", 0.2, None, "none", "5.6%"),
    )
    first, second = report.sections(made)
    assert first.title == "native positions, query: turn"
    assert first.header == ("budget", "method", "total", "a|b", "yes/no", "Rel.")
    assert first.rows == (
        ("", "Full", "80.0 ± 3.0", "80.0", "80.0", "100.0"),
        ("", "blind", "40.0 ± 3.0", "40.0", "40.0", "50.0"),
        ("5.6%", "m", "50.0 ± 3.0", "50.0", "50.0", "62.5"),
        ("5.6%", "n", "70.0 ± 3.0", "70.0", "70.0", "87.5"),
        ("22.2%", "m", "60.0 ± 3.0", "60.0", "60.0", "75.0"),
        ("64", "m", "55.0 ± 3.0", "55.0", "55.0", "68.8"),
    )
    assert second.title == "the model's own positions, query: none"
    assert [row[:2] for row in second.rows] == [("", "Full"), ("", "blind"), ("5.6%", "m")]


def test_several_data_sets(tmp_path: Path) -> None:
    made = results(
        tmp_path,
        run("blind", 0.4),
        run("Full", 0.8),
        run("Full", 0.5, data=TWO),
        run("m", 0.6, None, "turn", "8"),
        run("m", 0.55, None, "turn", "8", data=TWO),
        data=(ONE, TWO),
    )
    (section,) = report.sections(made)
    assert section.header[2:] == ("one: total", "one: a|b", "one: yes/no", "two: total", "Rel.")
    # The mean of 75 and 110; and blind has no score on the second.
    assert section.rows[-1][2:] == ("60.0 ± 3.0", "60.0", "60.0", "55.0 ± 3.0", "92.5")
    assert section.rows[1][2:] == ("40.0 ± 3.0", "40.0", "40.0", "–", "–")
    assert "mean over the data sets" in report.caption(made)


def test_markdown(tmp_path: Path) -> None:
    made = results(tmp_path, run("Full", 0.8), run("m", 0.6, None, "turn", "8"))
    lines = report.markdown(made).splitlines()
    assert lines[0] == "# some/model"
    assert lines[2] == report.caption(made)
    assert "accuracy / accuracy of Full x 100." in lines[2]
    assert "one (2 questions about 1 images)" in lines[2]
    assert "training split" not in lines[2], "there is no blind row"
    table = lines[lines.index("## the model's own positions, query: turn") + 2 :]
    assert table == [
        r"| budget | method | total | a\|b | yes/no | Rel. |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "|  | Full | 80.0 ± 3.0 | 80.0 | 80.0 | 100.0 |",
        "| 8 | m | 60.0 ± 3.0 | 60.0 | 60.0 | 75.0 |",
    ]


def test_terminal_shows_totals_of_several_sets_on_80_columns(tmp_path: Path) -> None:
    name = "anchorprune:tau=0.1"
    made = results(
        tmp_path,
        run("Full", 0.8),
        run("Full", 0.5, data=TWO),
        run(name, 0.6, None, "turn", "8"),
        run(name, 0.55, None, "turn", "8", data=TWO),
        data=(ONE, TWO),
    )
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in report.rich_tables(made):
        console.print(table)
    rows = [line for line in console.export_text().splitlines() if name in line]
    assert [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows] == [
        ["8", name, "60.0 ± 3.0", "55.0 ± 3.0", "92.5"]
    ]


def test_without_pruned_runs(tmp_path: Path) -> None:
    made = results(tmp_path, run("Full", 0.8))
    (section,) = report.sections(made)
    assert (section.title, len(section.rows)) == ("unpruned", 1)
    report.plot(made, tmp_path / "plot.png")


# --- the plot -----------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch):
    """The figures that are saved."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig

    def keep(figure: Figure, *args: object, **options: object) -> None:
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def lines_of(axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        bars.get_label(): (bars[0].get_xdata().tolist(), bars[0].get_ydata().tolist())
        for bars in axes.containers
    }


def test_plot_shows_the_accuracies(tmp_path: Path, drawn: list) -> None:
    made = results(
        tmp_path,
        run("blind", 0.4),
        run("Full", 0.8),
        run("m", 0.6, None, "turn", "20%"),
        run("m", 0.5, None, "turn", "5%"),
    )
    report.plot(made, tmp_path / "plot.png")
    (axes,) = drawn[0].axes
    ((places, heights),) = lines_of(axes).values()
    assert places == pytest.approx([5, 20])
    assert heights == pytest.approx([50, 60])
    (bars,) = axes.containers
    segments = [segment[:, 1].tolist() for segment in bars[2][0].get_segments()]
    assert segments == [pytest.approx([48, 54]), pytest.approx([58, 64])]
    levels = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
    assert (levels["Full"], levels["blind"]) == (pytest.approx(80), pytest.approx(40))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["5%", "20%"]
    assert Image.open(tmp_path / "plot.png").size[0] > 500


def test_mixed_budgets_stand_where_their_prompts_are(tmp_path: Path, drawn: list) -> None:
    made = results(tmp_path, run("m", 0.6, None, "turn", "20%"), run("m", 0.5, None, "turn", "5"))
    report.plot(made, tmp_path / "plot.png")
    (axes,) = drawn[0].axes
    assert lines_of(axes)["m"][0] == pytest.approx([20, 20])
    assert "prompt tokens" in axes.get_xlabel()


def test_twelve_methods_can_be_told_apart(tmp_path: Path, drawn: list) -> None:
    rng = np.random.default_rng(0)
    runs = [
        run(f"method {number}", rng.uniform(0.4, 0.9), place, "turn", budget, data=data)
        for place in ("compact", "native")
        for number in range(12)
        for budget in ("5.6%", "11.1%", "22.2%")
        for data in (ONE, TWO)
    ]
    full = [run("Full", 0.9), run("Full", 0.9, data=TWO)]
    report.plot(results(tmp_path, *full, *runs, data=(ONE, TWO)), tmp_path / "plot.png")
    (figure,) = drawn
    assert len(figure.axes) == 4
    looks = set()
    for axes in figure.axes:
        for bars in axes.containers:
            looks.add((bars.get_label(), bars[0].get_color(), bars[0].get_marker()))
    assert len(looks) == len({look[0] for look in looks}) == len({look[1:] for look in looks}) == 12
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 13
    # Beside the panels, not over them.
    width = figure.bbox.width
    assert legend.get_window_extent().x1 <= width
    assert max(axes.get_window_extent().x1 for axes in figure.axes) < legend.get_window_extent().x0

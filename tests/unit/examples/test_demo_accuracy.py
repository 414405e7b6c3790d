# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/accuracy.md: what is measured for them, and where they go."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anchorprune_vllm.commands.chosen_methods import parse_methods
from anchorprune_vllm.commands.eval.clutter import cluttered_scene
from anchorprune_vllm.commands.eval.plan import Configuration, engine_runs
from anchorprune_vllm.commands.eval.results import EvalResults, Run
from anchorprune_vllm.commands.eval.run import Evaluation
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE
from anchorprune_vllm.testing.demo_models.make import TRAINED, make_trained_model
from anchorprune_vllm.testing.local_model import one_rank
from tests.support.examples import load_example

ROOT = Path(__file__).parents[3]
accuracy: ModuleType = load_example("demo_accuracy.py")


def made_up(directory: Path, arch: str, *leave_out: str) -> EvalResults:
    """Results of a model on cluttered scenes: 90% unpruned, and a tenth less for each further row.

    With an interval of ±2%, and a kind of question of which a third is right.
    """
    results = EvalResults.open(directory, {"limit": 10}, [])
    for number, row in enumerate(accuracy.rows_of(arch)):
        share = 0.9 - number / 100
        interval, kinds = (share - 0.02, share + 0.02), {"shape": 1 / 3, "colour": share}
        if row.title in leave_out:
            continue
        for configuration in dict.fromkeys(row.at(budget) for budget in accuracy.BUDGETS):
            run = Run(
                **vars(configuration),
                data="clutter",
                accuracy=share,
                interval=interval,
                kinds=kinds,
            )
            results.runs.append(run)
    return results


def cells_of(table: str) -> list[list[str]]:
    """The cells of each line, without the empty one at the left of the header."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


# -- what is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize("arch", TRAINED)
def test_every_row_is_measured_and_nothing_else(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Configuration] = []

    def run_eval(wanted: Evaluation) -> None:
        runs = engine_runs(
            *(wanted.methods, wanted.budgets, wanted.query, wanted.positions, None, wanted.ceiling)
        )
        asked.extend(each for engine in runs for each in engine.configurations)

    monkeypatch.setattr(accuracy, "run_eval", run_eval)
    monkeypatch.setattr(accuracy, "make_trained_model", lambda *_: None)
    accuracy.measure(arch, tmp_path, 10)
    rows = accuracy.rows_of(arch)
    shown = {row.at(budget) for row in rows for budget in accuracy.BUDGETS}
    # Guesses without the image need no engine.
    assert {*asked} == shown - {Configuration("blind")}
    assert len(shown) == 2 + (len(rows) - 2) * len(accuracy.BUDGETS)


def test_a_model_s_settings_go_to_what_looks_at_the_question() -> None:
    methods = {row.title: row.method for row in accuracy.rows_of("llava-1.5")}
    assert methods["**AnchorPrune**"] == "anchorprune:similarity=raw"
    assert methods["cdpruner"] == "cdpruner:similarity=raw"
    assert methods["divprune"] == "divprune"
    (stage_1,) = parse_methods([methods["… Stage 1 alone"]])
    assert stage_1.settings() == {
        "method": "anchorprune",
        "similarity": "raw",
        **{"max_anchor_ratio": 1, "min_anchor": 256},
    }
    assert methods["… the paper's setting"] == "anchorprune:similarity=negated"


@pytest.mark.parametrize("arch", TRAINED)
def test_anchors_of_the_trained_models_lie_on_what_was_asked(arch: str, tmp_path: Path) -> None:
    make_trained_model(tmp_path / "model", arch)
    pictures = [cluttered_scene(FIRST_TEST_SCENE + number) for number in range(6)]
    with tempfile.TemporaryDirectory() as scratch, one_rank(Path(scratch)):
        hits = accuracy.anchor_hits(tmp_path / "model", pictures, TRAINED[arch], "5.6%")
    # Two of a kind for each scene, but one that is there to be seen.
    assert {kind: len(found) for kind, found in hits.items()} == {
        "colour": 12,
        "relation": 12,
        "shape": 12,
        "text": 12,
        "yes/no": 6,
    }
    assert sum(map(sum, hits.values())) > 0.7 * 54


# -- tables ---------------------------------------------------------------------------------------


def test_accuracy_has_a_cell_for_each_set_and_budget(tmp_path: Path) -> None:
    table = accuracy.accuracy_table("qwen2.5-vl", made_up(tmp_path, "qwen2.5-vl", "random"))
    header, line, *rows = cells_of(table)
    sets = [f"{name} {budget}" for name in accuracy.SETS for budget in accuracy.BUDGETS]
    assert header == sets
    assert set(line) == {"---", "---:"}
    by_title = {title: cells for title, *cells in rows}
    assert by_title["unpruned"] == ["90.0 ± 2.0"] * 3 + ["–"] * 6
    assert by_title["**AnchorPrune**"] == ["88.0 ± 2.0"] * 3 + ["–"] * 6
    assert by_title["random"] == ["–"] * 9
    assert [*by_title] == [row.title for row in accuracy.rows_of("qwen2.5-vl")]


def test_kinds_are_columns(tmp_path: Path) -> None:
    table = accuracy.kinds_table("llava-1.5", made_up(tmp_path, "llava-1.5", "random"))
    header, _, *rows = cells_of(table)
    assert header == ["colour", "shape"]
    assert rows[0] == ["unpruned", "90.0", "33.3"]
    assert len(rows) == len(accuracy.rows_of("llava-1.5")) - 1  # a row without a score is left out


def test_anchors_are_shares_of_the_questions() -> None:
    anchors = {"llava-1.5, anchorprune": {"colour": [90, 100], "shape": [0, 100]}}
    assert cells_of(accuracy.anchors_table(anchors))[2] == [
        *("`llava-1.5, anchorprune`", "90.0", "0.0", "45.0")
    ]


def test_the_summary_has_both_models_side_by_side(tmp_path: Path) -> None:
    results = {arch: made_up(tmp_path, arch) for arch in TRAINED}
    header, _, *rows = cells_of(accuracy.summary_table(results))
    assert header == [f"{arch}, {b}" for arch in TRAINED for b in accuracy.BUDGETS]
    by_title = {title: cells for title, *cells in rows}
    assert by_title["without the image"] == ["89.0 ± 2.0"] * 6
    assert tuple(by_title) == accuracy.IN_SUMMARY


# -- pages ----------------------------------------------------------------------------------------

PAGE = """# Title

<!-- one -->
old
<!-- end of one -->
between
<!-- two -->
<!-- end of two -->
end
"""


def test_only_what_is_between_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for block in (r"| a\1 |", "| b |\n| c |"):
        accuracy.fill(page, {"one": block, "two": "2"})
        filled = PAGE.replace("old", block).replace("two -->\n<", "two -->\n2\n<")
        assert page.read_text() == filled


def test_a_page_without_or_with_two_marks_is_left_as_it_is(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for page in (
        "no marks\n",
        PAGE.replace("<!-- two -->\n", ""),
        PAGE.replace("<!-- end of two -->\n", ""),
        PAGE.replace("<!-- two -->\n<!-- end of two -->\n", "<!-- end of two -->\n<!-- two -->\n"),
        PAGE + "<!-- two -->\n<!-- end of two -->\n",
        PAGE + "<!-- two -->\n",
    ):
        with subtests.test(page=page):
            path = tmp_path / "page.md"
            path.write_text(page)
            with pytest.raises(
                ValueError, match=r"page\.md: give <!-- \w+ --> and <!-- end of \w+ -->"
            ):
                accuracy.fill(path, {"one": "new", "two": "2"})
            assert path.read_text() == page


def test_the_pages_have_the_marks_that_are_filled_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("docs/accuracy.md", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    drawn: list[Any] = []
    anchors = {"llava-1.5": {"colour": [1, 2]}}
    for name, value in {
        "DOCS": tmp_path / "docs",
        "measure": lambda arch, *_: made_up(tmp_path, arch),
        "measure_anchors": lambda *_: anchors,
        "draw_examples": lambda *_: "![an example](example.png)",
        "plot": lambda *given: drawn.append(given),
    }.items():
        monkeypatch.setattr(accuracy, name, value)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setattr(sys, "argv", ["demo_accuracy.py", "--out", str(tmp_path)])
    accuracy.main()
    page, readme = ((tmp_path / name).read_text() for name in ("docs/accuracy.md", "README.md"))
    assert "<!-- examples -->\n![an example](example.png)\n<!-- end of examples -->" in page
    for text in (page, readme):
        marks = re.findall(r"<!-- ((?!end of ).+) -->\n(.*)\n", text)
        assert marks
        assert all(first_line.startswith(("|", "![", "- ")) for _, first_line in marks), marks
    assert [path for _, path in drawn] == [tmp_path / "docs" / "accuracy.png"]


def test_the_plot_has_all_rows(tmp_path: Path) -> None:
    accuracy.plot({arch: made_up(tmp_path, arch) for arch in TRAINED}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

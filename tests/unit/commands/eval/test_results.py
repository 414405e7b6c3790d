# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from anchorprune_vllm.commands.eval.data import DataSet
from anchorprune_vllm.commands.eval.plan import Configuration
from anchorprune_vllm.commands.eval.results import EvalResults, Run
from anchorprune_vllm.commands.eval.vqa_data import Picture, Question

SETTINGS = {"model": "m", "limit": 5, "questions": {"mine": "abc"}}
DATA = DataSet(
    "mine",
    (
        Picture(Image.Image, (Question("1?", ("yes",), "b"), Question("2?", ("x", "y"), "a"))),
        Picture(Image.Image, (Question("3?", ("no",), "b"),)),
    ),
)
FULL = Configuration("Full")
PRUNED = Configuration("anchorprune", "native", "turn", "16")


def results(directory: Path, **changes: object) -> EvalResults:
    return EvalResults.open(directory, {**SETTINGS, **changes}, [DATA])


def test_answers_are_judged_one_by_one() -> None:
    run = Run.of_answers(PRUNED, DATA, ["no", " Y.", "no"])
    assert run.right == (False, True, True)
    assert run.accuracy == pytest.approx(2 / 3)
    assert run.kinds == {"a": 1.0, "b": 0.5}
    with pytest.raises(ValueError, match="zip"):
        Run.of_answers(PRUNED, DATA, ["no"])


def test_written_and_read_back(tmp_path: Path) -> None:
    written = results(tmp_path / "new" / "folder")
    full = Run.of_answers(FULL, DATA, ["yes", "x", "yes"], prompt_tokens=33.5, seconds=1.0)
    pruned = Run.of_answers(PRUNED, DATA, ["yes", "z", "yes"], prompt_tokens=20.0, seconds=0.5)
    written.add(full)
    assert results(tmp_path / "new" / "folder").runs == [full]
    written.add(pruned)
    read = results(tmp_path / "new" / "folder")
    assert read.runs == [full, pruned]
    assert (FULL, "mine") in read
    assert (PRUNED, "mine") in read
    assert (PRUNED, "other") not in read
    assert (Configuration("anchorprune", "compact", "turn", "16"), "mine") not in read
    assert read.relative(PRUNED) == pytest.approx(50.0)
    assert read.relative(FULL) == pytest.approx(100.0)


def test_the_file_is_enough_for_paired_comparisons(tmp_path: Path) -> None:
    results(tmp_path).add(
        Run.of_answers(FULL, DATA, ["yes", "x", "yes"]),
        Run.of_answers(PRUNED, DATA, ["no", "y", "no"]),
    )
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["data"]["mine"] == {
        "questions_per_picture": [2, 1],
        "kinds": {"a": "010", "b": "101"},
    }
    assert [run["right"] for run in stored["runs"]] == ["110", "011"]
    assert stored["runs"][1]["answers"] == ["no", "y", "no"]
    assert stored["runs"][1]["relative"] == pytest.approx(100.0)
    assert stored["settings"] == SETTINGS


def test_other_settings_are_refused(tmp_path: Path) -> None:
    results(tmp_path).add(Run.of_answers(FULL, DATA, ["yes", "x", "yes"]))
    with pytest.raises(ValueError, match="limit 5, now 9") as error:
        results(tmp_path, limit=9)
    assert "choose another --out" in str(error.value)
    with pytest.raises(ValueError, match=r"\(other questions\)"):
        results(tmp_path, questions={"mine": "abd"})
    with pytest.raises(ValueError, match="prompt None, now 'x'"):
        results(tmp_path, prompt="x")


@pytest.mark.parametrize("content", ["", "[]", '{"settings": {}}', '{"settings": 1, "runs": [{}]}'])
def test_a_broken_file_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match="remove the file, or choose another --out"):
        results(tmp_path)
    assert (tmp_path / "results.json").read_text() == content


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = results(tmp_path)
    full = Run.of_answers(FULL, DATA, ["yes", "x", "yes"])
    kept.add(full)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # In the middle: the new contents are there, the old ones have not been replaced.
        patch.setattr("os.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kept.add(Run.of_answers(PRUNED, DATA, ["yes", "x", "yes"]))
    assert results(tmp_path).runs == [full]

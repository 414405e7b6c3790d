# SPDX-License-Identifier: Apache-2.0
"""The local task for lmms-eval, without lmms-eval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from anchorprune_vllm.commands.eval.vqa_data import Picture, Question
from tests.support.examples import EXAMPLES, load_example

TASK = EXAMPLES / "lmms_tasks" / "easy_vqa"
utils = load_example("lmms_tasks/easy_vqa/utils.py")
make_data = load_example("lmms_tasks/easy_vqa/make_data.py")


def test_data_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = (
        Question("what color is it?", ("red",), "colour"),
        Question("is it red?", ("yes",), "yes/no"),
    )
    pictures = [Picture(lambda: Image.new("RGB", (4, 4), "red"), questions)]
    monkeypatch.setattr(make_data, "easy_vqa", lambda split: pictures if split == "test" else [])
    monkeypatch.setattr(utils, "_DATA", tmp_path)
    assert make_data.write_data(tmp_path) == 2
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    wanted = {"image": "images/0.png", "question": "is it red?", "answer": "yes", "kind": "yes/no"}
    assert wanted in rows
    (image,) = utils.picture(wanted)
    assert image.getpixel((0, 0)) == (255, 0, 0)
    assert utils.question(wanted) == "is it red?"


def test_score(subtests: pytest.Subtests) -> None:
    for given, hit in (("red", 1), (" Red.\n", 1), ("dark red", 0), ("", 0), ("blue", 0)):
        with subtests.test(given=given, hit=hit):
            row = {"answer": "red", "kind": "colour"}
            assert utils.score(row, [given]) == {"exact_match": hit, "colour": hit}


def test_every_metric_is_in_the_task() -> None:
    text = (TASK / "easy_vqa.yaml").read_text(encoding="utf-8")
    for kind in utils._METRICS:
        for metric in utils.score({"answer": "x", "kind": kind}, ["x"]):
            assert f"- metric: {metric}\n" in text

# SPDX-License-Identifier: Apache-2.0
"""The process that draws the demo's example: how it fails, and how it is stopped."""

from __future__ import annotations

from pathlib import Path

from anchorprune_vllm.commands.demo.questions import questions_for
from anchorprune_vllm.commands.demo.run import Drawing

QUESTION = questions_for("llava-1.5")(0)


def test_an_example_that_cannot_be_drawn_names_its_log(tmp_path: Path) -> None:
    with Drawing(tmp_path, tmp_path / "none", QUESTION, {}, "8") as drawing:
        told = drawing.finish()
    log = tmp_path / "example.log"
    assert told == f"The example could not be drawn: see {log}"
    assert f"there is no model directory '{tmp_path / 'none'}'" in log.read_text()


def test_a_drawing_ends_with_its_block(demo_model: Path, tmp_path: Path) -> None:
    with Drawing(tmp_path, demo_model, QUESTION, {}, "8") as drawing:
        process = drawing._process
        assert process.poll() is None
    assert process.poll() not in (None, 0)  # stopped on the way

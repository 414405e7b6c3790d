# SPDX-License-Identifier: Apache-2.0
"""The demo's example as text, and what the demo says when it cannot be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anchorprune_vllm.commands.chosen_methods import ChosenMethod
from anchorprune_vllm.commands.demo.drawing import Drawing, as_text
from anchorprune_vllm.commands.demo.questions import questions_for

QUESTION = questions_for("llava-1.5")(0)


def explained(indices: list[int], is_anchor: list[bool]) -> dict[str, Any]:
    """The JSON of an image with two rows of three tokens."""
    boxes = [[x, y, x + 14.0, y + 14.0] for y in (0.0, 14.0) for x in (0.0, 14.0, 28.0)]
    panel = {"indices": indices, "is_anchor": is_anchor}
    return {"view": {"units": [{"tokens": boxes}]}, "methods": [{"panels": [panel]}]}


@pytest.mark.parametrize(
    ("indices", "is_anchor", "lines"),
    [
        ([1, 3, 5], [False, True, False], ["··▒▒··", "██··▒▒"]),
        ([5, 1, 3], [False, False, True], ["··▒▒··", "██··▒▒"]),  # in the order of choice
        ([], [], ["······", "······"]),
    ],
)
def test_tokens_are_drawn_where_they_are(
    indices: list[int], is_anchor: list[bool], lines: list[str]
) -> None:
    assert as_text(explained(indices, is_anchor)).splitlines() == lines


def test_an_example_that_cannot_be_drawn_names_its_log(tmp_path: Path) -> None:
    with Drawing(
        tmp_path, tmp_path / "none", QUESTION, ChosenMethod("anchorprune"), "8"
    ) as drawing:
        told = drawing.finish()
    log = tmp_path / "example.log"
    assert told == f"The example could not be drawn: see {log}"
    assert f"there is no model directory '{tmp_path / 'none'}'" in log.read_text()


def test_a_drawing_ends_with_its_block(demo_model: Path, tmp_path: Path) -> None:
    with Drawing(tmp_path, demo_model, QUESTION, ChosenMethod("anchorprune"), "8") as drawing:
        process = drawing._process
        assert process.poll() is None
    assert process.poll() not in (None, 0)  # stopped on the way

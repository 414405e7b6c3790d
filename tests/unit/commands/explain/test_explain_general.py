# SPDX-License-Identifier: Apache-2.0
"""`anchorprune explain` for models that the general adapter serves."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anchorprune_vllm.commands.explain.look import Look, load, look
from anchorprune_vllm.commands.explain.media import Asked
from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.media import Media, as_data_url
from tests.support.pictures import picture

pytestmark = pytest.mark.usefixtures("rank")

SIZE = (700, 500)


def look_at(arch: str, directory: Path, method: str = "anchorprune") -> Look:
    make_demo_model(directory / "model", arch=arch)
    options: dict[str, Any] = {"max_model_len": 2048}
    loaded = load(str(directory / "model"), {"method": method, "budget": 16}, options)
    asked = Asked("noise", Media("picture", as_data_url(picture(3, SIZE))), "Where is it red?")
    return look(loaded, asked, method, ["20"])


@pytest.mark.parametrize(
    ("arch", "units"),
    [
        ("qwen3-vl", ["image"]),
        ("glm-4v", ["image"]),
        ("gemma3", ["image"]),
        ("mistral3", ["image"]),
        ("internvl", ["tile"]),
        ("idefics3", ["tile"]),
        ("llama4", ["tile"]),
    ],
)
def test_every_token_has_a_box_and_its_numbers(arch: str, units: list[str], tmp_path: Path) -> None:
    found = look_at(arch, tmp_path)
    view, method = found.view, found.method
    assert {unit.name.split()[0] for unit in view.units} == {*units}
    (panel,) = method.panels
    tokens = len(view.tokens)
    assert len(panel.indices) == len({*panel.indices}) == 20
    assert max(panel.indices) < tokens
    assert len(method.relevance or ()) == len(method.importance or ()) == tokens
    # Each unit's anchor is within it, and as large as is said.
    ends = [*accumulate(len(unit.tokens) for unit in view.units)]
    anchor = [i for i, flag in zip(panel.indices, panel.is_anchor, strict=True) if flag]
    for each in panel.anchors:
        start = ends[each.unit] - len(view.units[each.unit].tokens)
        assert sum(start <= i < ends[each.unit] for i in anchor) == each.size
    assert sum(each.size for each in panel.anchors) == len(anchor) > 0


@pytest.mark.parametrize("arch", ["qwen3-vl", "glm-4v", "mistral3"])
def test_boxes_hold_what_was_given_there(arch: str, tmp_path: Path) -> None:
    """The picture is scaled at most, so the colour of a box is that of the same place in it."""
    view = look_at(arch, tmp_path).view
    given = np.asarray(picture(3, SIZE).resize(view.image.size), dtype=float)
    shown = np.asarray(view.image, dtype=float)
    for box in view.tokens:
        left, top, right, bottom = (round(edge) for edge in box)
        both = [array[top:bottom, left:right].mean((0, 1)) for array in (given, shown)]
        np.testing.assert_allclose(*both, atol=6)


def test_a_method_that_sums_tokens_of_a_tower_whose_order_is_stated(tmp_path: Path) -> None:
    found = look_at("qwen3-vl", tmp_path, method="visionzip")
    (panel,) = found.method.panels
    assert panel.summed is not None
    assert {*panel.indices} <= {*panel.summed}
    assert found.method.relevance is None

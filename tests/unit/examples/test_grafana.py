# SPDX-License-Identifier: Apache-2.0
"""The dashboard asks for metrics that exist, and for all of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import vllm

from anchorprune_vllm.metrics.families import FAMILIES
from tests.support.dashboard import dashboard, expressions, metrics_in

OURS = {name for family in FAMILIES for name in family.samples}
_LABELS = re.compile(r"sum by \(([a-z_, ]+)\) \(rate\((vllm:anchorprune_[a-z_]+)")


@pytest.fixture(scope="module")
def of_vllm() -> set[str]:
    """Names in the source of vLLM's own metrics; a scrape is compared in the engine tests."""
    source = Path(vllm.__file__).parent / "v1" / "metrics" / "loggers.py"
    return set(re.findall(r'"(vllm:[a-z_]+)"', source.read_text()))


def test_metrics_exist(of_vllm: set[str], subtests: pytest.Subtests) -> None:
    for expression in expressions():
        with subtests.test(expression=expression):
            named = metrics_in(expression)
            assert named
            for name in named:
                assert name in OURS or name.removesuffix("_bucket") in of_vllm


def test_brackets_close(subtests: pytest.Subtests) -> None:
    for expression in expressions():
        with subtests.test(expression=expression):
            for opening, closing in ("()", "[]", "{}"):
                assert expression.count(opening) == expression.count(closing)


def test_all_of_ours_are_shown() -> None:
    shown = set().union(*map(metrics_in, expressions()))
    assert [f.name for f in FAMILIES if not shown & set(f.samples)] == []


def test_labels_exist() -> None:
    families = {name: family for family in FAMILIES for name in family.samples}
    asked = [found for e in expressions() for found in _LABELS.findall(e)]
    assert len(asked) > 5
    for labels, name in asked:
        assert set(labels.split(", ")) <= {*families[name].labels, "le"}


def test_panels_do_not_overlap() -> None:
    cells = []
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells += [
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        ]
    assert len(cells) == len(set(cells))
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))

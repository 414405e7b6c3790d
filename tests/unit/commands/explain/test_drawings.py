# SPDX-License-Identifier: Apache-2.0
"""Image, page and text of an explanation that was made by hand."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from anchorprune_vllm.commands.explain.drawing import (
    ANCHOR,
    CONTEXT,
    VEILS,
    as_text,
    cells,
    draw,
    draw_map,
    draw_panel,
    fitted,
    heat,
    page,
)
from anchorprune_vllm.commands.explain.explanation import (
    Explanation,
    MethodView,
    Panel,
    UnitAnchor,
    UnitView,
    View,
    ranks,
)

GROUND = (200, 180, 160)
SIDE = 20


def view(units: int = 1) -> View:
    """Each unit has 2 x 3 tokens, and stands below the one before."""
    picture = Image.new("RGB", (3 * SIDE, 60 * units), GROUND)
    parts = []
    for number in range(units):
        top = 60 * number + 20
        boxes = tuple(
            (x * SIDE, top + y * SIDE, (x + 1) * SIDE, top + (y + 1) * SIDE)
            for y in range(2)
            for x in range(3)
        )
        parts.append(UnitView(f"crop {number}", (0, top, 60, top + 40), boxes))
    return View(picture, tuple(parts))


PANEL = Panel(
    budget="3",
    indices=(0, 2, 4),
    is_anchor=(True, False, False),
    anchors=(UnitAnchor(0, 3, 1, 1, 1, (), "K_max"),),
)
MERGED = Panel(budget="2", indices=(1, 3), is_anchor=(False, False), summed=(1, 3, 5))
SCORES = (0.1, 0.6, 0.2, 0.3, 0.4, 0.5)


def explanation(**changes: object) -> Explanation:
    ours = MethodView("anchorprune", True, SCORES, SCORES[::-1], (PANEL,))
    other = MethodView("visionzip", False, None, SCORES, (MERGED,))
    given = {"model": "m", "media": "a.png", "question": "Why?", "view": view()}
    return Explanation(**{**given, "methods": (ours, other), **changes})  # type: ignore[arg-type]


def middle(picture: Image.Image, token: int) -> tuple[int, int, int]:
    left, top, right, bottom = view().tokens[token]
    return picture.getpixel(((left + right) // 2, (top + bottom) // 2))  # type: ignore[return-value, arg-type]


def corner(picture: Image.Image, token: int) -> tuple[int, int, int]:
    left, top, *_ = view().tokens[token]
    return picture.getpixel((left, top))  # type: ignore[return-value, arg-type]


def veiled(share: float) -> tuple[int, ...]:
    return tuple(round(value * (1 - share)) for value in GROUND)


def test_kept_tokens_are_outlined_and_dropped_ones_dimmed() -> None:
    picture = draw_panel(view(), PANEL)
    assert [middle(picture, token) == GROUND for token in range(6)] == [1, 0, 1, 0, 1, 0]
    for token in (1, 3, 5):
        assert middle(picture, token) == pytest.approx(veiled(VEILS["dropped"]), abs=1)
    assert corner(picture, 0) == ANCHOR
    assert corner(picture, 2) == corner(picture, 4) == CONTEXT
    assert picture.getpixel((30, 10)) == GROUND  # of no token


def test_tokens_that_looked_new_have_a_dot() -> None:
    anchor = UnitAnchor(0, 3, 1, 1, 1, (0,), "novel tokens")
    panel = Panel("3", PANEL.indices, PANEL.is_anchor, (anchor,))
    picture = draw_panel(view(), panel)
    assert middle(picture, 0) == ANCHOR
    assert middle(picture, 2) == GROUND


def test_summed_tokens_are_half_dimmed() -> None:
    picture = draw_panel(view(), MERGED)
    assert middle(picture, 5) == pytest.approx(veiled(VEILS["merged"]), abs=1)
    assert middle(picture, 0) == pytest.approx(veiled(VEILS["dropped"]), abs=1)
    assert corner(picture, 1) == CONTEXT


def test_maps_go_from_dark_to_bright() -> None:
    picture = draw_map(view(), SCORES)
    shades = [sum(middle(picture, token)) for token in range(6)]
    assert sorted(range(6), key=shades.__getitem__) == [0, 2, 3, 4, 5, 1]
    assert [heat(0), heat(1)] == [(24, 15, 60), (252, 245, 150)]


def test_the_picture_has_a_cell_for_everything() -> None:
    both, one = draw(explanation()), draw(explanation(methods=explanation().methods[:1]))
    assert one.width == both.width
    assert one.height < both.height < 2 * one.height
    colours = {colour for _, colour in both.getcolors(2**20) or []}
    assert {ANCHOR, CONTEXT} <= colours


@pytest.mark.parametrize(("panels", "cells"), [(1, 4), (2, 5), (3, 6)])
def test_the_picture_grows_with_the_budgets(panels: int, cells: int) -> None:
    method = MethodView("anchorprune", True, SCORES, SCORES, (PANEL,) * panels)
    width = draw(explanation(methods=(method,))).width
    square = 340  # a view of another shape has as many pixels
    side = round(60 * square / (60 * 60) ** 0.5)
    assert width == cells * (side + 18) + 18


def test_units_have_names_above_them() -> None:
    both = fitted(view(2))
    for unit in both.units:
        left, top, right, _ = (round(edge) for edge in unit.box)
        assert len(both.image.crop((left, top - 14, right, top)).getcolors() or []) > 1
    assert fitted(view()).image.getcolors() == [(340 * 340, GROUND)]
    method = MethodView("anchorprune", True, SCORES * 2, SCORES * 2, ())
    for cell in cells(method, both):
        assert cell.notes[7].startswith("token 7 in crop 1, relevance")


@pytest.mark.parametrize(
    ("indices", "is_anchor", "lines"),
    [
        ((1, 3, 5), (False, True, False), ["··▒▒··", "██··▒▒"]),
        ((5, 1, 3), (False, False, True), ["··▒▒··", "██··▒▒"]),  # in the order of choice
        ((), (), ["······", "······"]),
    ],
)
def test_text_has_a_line_for_each_row(
    indices: tuple[int, ...], is_anchor: tuple[bool, ...], lines: list[str]
) -> None:
    legend, _, *drawn = as_text(view().tokens, Panel("3", indices, is_anchor)).splitlines()
    assert legend == "██ anchor, ▒▒ context, ·· dropped"
    assert drawn == lines


class Parts(HTMLParser):
    """Counts what a page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "title":
            self.titles.append(data)


def test_the_page_has_a_cell_for_everything() -> None:
    parts = Parts(page(explanation()))
    assert parts.tags.count("svg") == 2 * 4  # the image, two maps, one budget
    assert parts.tags.count("rect") == 6 * parts.tags.count("svg")
    assert "token 1, relevance 0.6 (rank 1), importance 0.4 (rank 3): dropped" in parts.titles
    assert "token 3, importance 0.3 (rank 4): context" in parts.titles


def test_the_page_needs_no_network_and_no_script() -> None:
    text = page(explanation(question="<script>alert(1)</script>", media="a&b.png"))
    assert "<script" not in text
    assert "a&amp;b.png" in text
    assert not re.search(r"https?:|href=|@import", text)
    addresses = re.findall(r"(?:url\(|src=\")(.{10})", text)
    assert addresses == ["data:image"] * (1 + 2 * 4)


def test_ranks_begin_with_the_highest_and_ties_with_the_first() -> None:
    assert ranks((0.5, 2.0, 0.5, -1.0), [4]) == [2, 1, 3, 4]
    assert ranks((0.5, 2.0, 0.5, -1.0), [2, 2]) == [2, 1, 1, 2]


@pytest.mark.parametrize(
    ("anchors", "words"),
    [
        ([(10, 5, 5, 5, 1)], "K_min 2, K_max 5; ended at K_max: 1 looked new"),
        ([(10, 4, 4, 5, 3)], "K_min 2, K_max 5; ended at 4: 3 tokens looked new"),
        (
            [(10, 4, 4, 5, 3), (12, 6, 6, 6, 0)],
            "2 units with 4 to 6 each; K_min 2, K_max 5 to 6; 1 ended at a token that "
            "looked new, 1 at K_max",
        ),
    ],
)
def test_captions_say_where_the_rule_stopped(
    anchors: list[tuple[int, int, int, int, int]], words: str
) -> None:
    units = tuple(
        UnitAnchor(
            number,
            budget,
            2,
            size,
            most,
            tuple(range(new)),
            "novel tokens" if new == 3 else "K_max",
        )
        for number, (budget, _, size, most, new) in enumerate(anchors)
    )
    panel = Panel("3", (0, 1, 2), (True, True, False), units)
    assert panel.caption(12) == ["3 of 12 tokens (25.0%): anchor 2, context 1", words]


def test_captions_of_other_methods() -> None:
    assert MERGED.caption(6)[1] == (
        "sums of tokens, outlined where each stands; half dimmed: 1 summed up"
    )
    assert explanation().methods[1].maps()[0] == (
        "relevance: not looked at by this method",
        None,
    )

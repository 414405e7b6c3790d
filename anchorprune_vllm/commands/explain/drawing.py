# SPDX-License-Identifier: Apache-2.0
"""An explanation as one image, as a page, and as text: a row of cells for each method.

The first cell shows the view, then there are one for each signal and one for each budget. The page
has the same cells as the image, and shows the numbers of the token under the pointer.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image, ImageDraw, ImageFont, ImageOps

from anchorprune_vllm.commands.explain.explanation import (
    Explanation,
    MethodView,
    Panel,
    PixelBox,
    State,
    UnitView,
    View,
    ranks,
)
from anchorprune_vllm.testing.media import as_data_url

ANCHOR, CONTEXT = (255, 106, 0), (0, 149, 255)
OUTLINES: Mapping[State, tuple[int, int, int]] = {"anchor": ANCHOR, "context": CONTEXT}
VEILS: Mapping[State, float] = {"dropped": 0.72, "merged": 0.36}
"""How far tokens are dimmed, from 0 to 1."""

_LEGEND: Mapping[State | None, str] = {
    "anchor": "anchor: most relevant to the question",
    "context": "context, or what another method keeps",
    "merged": "summed into a kept one",
    "dropped": "dropped",
    None: "looked new: enough of these end the anchor",
}
_SIGNS: Mapping[State, str] = {"anchor": "██", "context": "▒▒", "merged": "··", "dropped": "··"}
_HEAT = ((24, 15, 60), (98, 25, 110), (188, 55, 84), (243, 132, 40), (252, 245, 150))
_HEAT_OPACITY = 0.72
_TEXT, _TITLE = 14, 19
_MARGIN = 18
_CELL = 340  # side of a square view; others have about its area
_WIDEST, _NARROWEST = 2200, 1280  # six square cells; the legend
_INK, _PAPER = "#1a1a1a", "white"


@dataclass(frozen=True)
class Cell:
    """A drawing of a view, with its caption and what there is to say about each token."""

    caption: str
    image: Image.Image
    notes: Sequence[str]


def cells(method: MethodView, view: View) -> Iterator[Cell]:
    """Yield the cells of a method."""
    notes = _notes(method, view)
    yield Cell("as the vision tower gets it", view.image, notes)
    for caption, scores in method.maps():
        blank = Image.new("RGB", view.image.size, "#e4e4e4")
        yield Cell(caption, blank if scores is None else draw_map(view, scores), notes)
    for panel in method.panels:
        states = panel.states(len(notes))
        yield Cell(
            "\n".join(panel.caption(len(notes))),
            draw_panel(view, panel),
            [f"{note}: {state}" for note, state in zip(notes, states, strict=True)],
        )


def draw_panel(view: View, panel: Panel) -> Image.Image:
    """Outline kept tokens, dim the others, and put a dot on those that looked new."""
    boxes = view.tokens
    layer = Image.new("RGBA", view.image.size)
    draw = ImageDraw.Draw(layer)
    for box, state in zip(boxes, panel.states(len(boxes)), strict=True):
        left, top, right, bottom = (round(edge) for edge in box)
        pixels = (left, top, right - 1, bottom - 1)
        if state in VEILS:
            draw.rectangle(pixels, fill=(0, 0, 0, round(255 * VEILS[state])))
        else:
            draw.rectangle(pixels, outline=OUTLINES[state], width=max(2, (right - left) // 10))
    for token in (token for anchor in panel.anchors for token in anchor.novel):
        x0, y0, x1, y1 = boxes[token]
        middle, radius = ((x0 + x1) / 2, (y0 + y1) / 2), max(2.0, (x1 - x0) / 7)
        draw.circle(middle, radius, fill=ANCHOR, outline=_PAPER)
    return Image.alpha_composite(view.image.convert("RGBA"), layer).convert("RGB")


def draw_map(view: View, scores: Sequence[float]) -> Image.Image:
    """Colour tokens from dark, for the lowest score, to bright."""
    layer = Image.new("RGBA", view.image.size)
    draw = ImageDraw.Draw(layer)
    low, high = min(scores), max(scores)
    for box, score in zip(view.tokens, scores, strict=True):
        left, top, right, bottom = (round(edge) for edge in box)
        colour = (*heat((score - low) / ((high - low) or 1)), round(255 * _HEAT_OPACITY))
        draw.rectangle((left, top, right - 1, bottom - 1), fill=colour)
    grey = view.image.convert("L").convert("RGBA")
    return Image.alpha_composite(grey, layer).convert("RGB")


def heat(value: float) -> tuple[int, ...]:
    """Return the colour of a value from 0, dark, to 1, bright."""
    stops = np.linspace(0, 1, len(_HEAT))
    return tuple(
        round(float(np.interp(value, stops, channel))) for channel in zip(*_HEAT, strict=True)
    )


def as_text(boxes: Sequence[PixelBox], panel: Panel) -> str:
    """Draw what is kept of one image as text: a legend, and a line for each row of tokens."""
    rows: dict[float, str] = {}
    for (_, top, _, _), state in zip(boxes, panel.states(len(boxes)), strict=True):
        rows[top] = rows.get(top, "") + _SIGNS[state]
    legend = ", ".join(f"{sign} {state}" for state, sign in _SIGNS.items() if state != "merged")
    return "\n".join([legend, "", *rows.values()])


def page(explanation: Explanation) -> str:
    """Return an HTML page that needs nothing else: no network and no scripts."""
    environment = Environment(
        loader=PackageLoader("anchorprune_vllm.commands.explain", "."),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    view = fitted(explanation.view)
    return environment.get_template("page.html.jinja").render(
        explanation=explanation,
        view=view,
        legend=as_data_url(_legend()),
        blocks=[(method.method, cells(method, view)) for method in explanation.methods],
        as_data_url=as_data_url,
    )


def draw(explanation: Explanation) -> Image.Image:
    """Draw the whole explanation as one image."""
    view = fitted(explanation.view)
    wide = view.image.width
    blocks = [(method.method, [*cells(method, view)]) for method in explanation.methods]
    most = max(len(block) for _, block in blocks)
    columns = max(1, min(most, (_WIDEST - _MARGIN) // (wide + _MARGIN)))
    width = max(columns * (wide + _MARGIN) - _MARGIN, _NARROWEST)
    rows = [
        _text(explanation.question, width, _TITLE),
        _text(f"{explanation.media}, {explanation.model}", width),
        _legend(),
    ]
    for title, block in blocks:
        rows.append(_text(title, width, _TITLE))
        drawn = [_stack([_text(cell.caption, wide), cell.image], 4) for cell in block]
        for start in range(0, len(drawn), columns):
            rows.append(_stack(drawn[start : start + columns], _MARGIN, across=True))
    return ImageOps.expand(_stack(rows, 10), _MARGIN, _PAPER)


def _notes(method: MethodView, view: View) -> list[str]:
    """Describe each token: its number, its unit if there are several, its scores and ranks."""
    sizes = [len(unit.tokens) for unit in view.units]
    names = [f" in {unit.name}" * (len(sizes) > 1) for unit in view.units for _ in unit.tokens]
    notes = [f"token {number}{name}" for number, name in enumerate(names)]
    # Anchors are chosen by relevance within each unit, the context by importance among all tokens.
    for name, scores, parts in (
        ("relevance", method.relevance, sizes),
        ("importance", method.importance, [sum(sizes)]),
    ):
        if scores is not None:
            ranked = zip(notes, scores, ranks(scores, parts), strict=True)
            notes = [f"{note}, {name} {score:.4g} (rank {rank})" for note, score, rank in ranked]
    return notes


def fitted(view: View) -> View:
    """Scale a view to the size of a cell, and write the names of units above them if several."""
    width, height = view.image.size
    by_area = _CELL * (len(view.units) / (width * height)) ** 0.5
    factor = min(by_area, (_WIDEST - 2 * _MARGIN) / width)

    def scaled(box: PixelBox) -> PixelBox:
        left, top, right, bottom = (factor * edge for edge in box)
        return left, top, right, bottom

    units = tuple(
        UnitView(unit.name, scaled(unit.box), tuple(map(scaled, unit.tokens)))
        for unit in view.units
    )
    size = (round(factor * width), round(factor * height))
    image = view.image.resize(size, Image.Resampling.BICUBIC)
    for unit in units if len(units) > 1 else ():
        left, top, right, _ = unit.box
        font = _font(max(9, min(_TEXT, int((right - left) / 8))))
        ImageDraw.Draw(image).text((left, top - 5), unit.name, _INK, font, anchor="ls")
    return View(image, units)


def _legend() -> Image.Image:
    """Draw what the colours mean."""
    parts = []
    for state, words in _LEGEND.items():
        sign = Image.new("RGB", (_TEXT + 1, _TEXT + 1), _PAPER)
        draw = ImageDraw.Draw(sign)
        if state is None:
            draw.circle((_TEXT / 2, _TEXT / 2), _TEXT / 4, fill=ANCHOR)
        elif state in OUTLINES:
            draw.rectangle((0, 0, _TEXT, _TEXT), outline=OUTLINES[state], width=3)
        else:
            draw.rectangle((0, 0, _TEXT, _TEXT), fill=(round(255 * (1 - VEILS[state])),) * 3)
        parts.append(_stack([sign, _text(words, _NARROWEST)], 8, across=True))
    return _stack(parts, 24, across=True)


def _text(text: str, width: int, size: int = _TEXT) -> Image.Image:
    """Write lines of text, broken between words where they would be wider than about `width`."""
    font = _font(size)
    lines: list[str] = []
    for line in text.splitlines():
        letters = int(width * len(line) / (font.getlength(line) or 1))
        lines += textwrap.wrap(line, max(1, letters)) or [""]
    right = max(font.getlength(line) for line in lines)
    image = Image.new("RGB", (int(right) + 1, len(lines) * (size + 5)), _PAPER)
    ImageDraw.Draw(image).text((0, 0), "\n".join(lines), _INK, font, spacing=4)
    return image


def _stack(images: Sequence[Image.Image], gap: int = 0, *, across: bool = False) -> Image.Image:
    """Put images below one another, or across the page with their lower edges in a line."""
    widths, heights = zip(*(image.size for image in images), strict=True)
    free = gap * (len(images) - 1)
    size = (sum(widths) + free, max(heights)) if across else (max(widths), sum(heights) + free)
    stacked = Image.new("RGB", size, _PAPER)
    place = 0
    for image in images:
        stacked.paste(image, (place, size[1] - image.height) if across else (0, place))
        place += gap + (image.width if across else image.height)
    return stacked


def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font

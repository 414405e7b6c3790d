# SPDX-License-Identifier: Apache-2.0
"""An explanation as one picture: a block for each method, its maps and budgets side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from PIL import Image, ImageDraw, ImageFont

from anchorprune_vllm.commands.explain.explanation import (
    Explanation,
    MethodView,
    Panel,
    State,
    scaled,
)
from anchorprune_vllm.commands.explain.style import (
    DOT,
    HEAT_OPACITY,
    LEGEND,
    OUTLINES,
    VEILS,
    heat,
)
from anchorprune_vllm.commands.explain.views import Box, View

_TEXT, _TITLE = 14, 19
_MARGIN = 18
_WIDEST, _NARROWEST = 2200, 900  # six square cells
_CELL = 340  # side of a square view; others have about its area
_INK, _PAPER, _FRAME = "#1a1a1a", "white", "#b0b4ba"


@dataclass(frozen=True)
class _Cell:
    caption: str
    picture: Image.Image


def draw(explanation: Explanation) -> Image.Image:
    """The whole picture."""
    view = _enlarged(explanation.view)
    blocks = [(each.method, list(_cells(each, view))) for each in explanation.methods]
    pitch = view.picture.width + _MARGIN
    fitting = max(1, (_WIDEST - _MARGIN) // pitch)
    columns = min(fitting, max(len(cells) for _, cells in blocks))
    width = max(columns * pitch + _MARGIN, _NARROWEST)
    rows = [
        _text_row(explanation.question, width, _TITLE),
        _text_row(f"{explanation.media}, {explanation.model}", width, _TEXT),
        _legend(width),
    ]
    for title, cells in blocks:
        rows.append(_text_row(title, width, _TITLE))
        for start in range(0, len(cells), columns):
            rows.append(_row(cells[start : start + columns], width))
    picture = Image.new("RGB", (width, sum(row.height for row in rows)), _PAPER)
    top = 0
    for row in rows:
        picture.paste(row, (0, top))
        top += row.height
    return picture


def draw_panel(view: View, panel: Panel) -> Image.Image:
    """Dropped tokens dimmed, kept ones outlined."""
    boxes = view.tokens
    states = panel.states(len(boxes))
    picture = view.picture.copy()
    for box, state in zip(boxes, states, strict=True):
        if state in VEILS:
            _blend(picture, box, (0, 0, 0), VEILS[state])
    draw = ImageDraw.Draw(picture)
    for box, state in zip(boxes, states, strict=True):
        if state in OUTLINES:
            left, top, right, bottom = _pixels(box)
            line = max(2, (right - left) // 10)
            draw.rectangle((left, top, right - 1, bottom - 1), outline=OUTLINES[state], width=line)
    for token in (token for anchor in panel.anchors for token in anchor.novel):
        x0, y0, x1, y1 = boxes[token]
        middle, radius = ((x0 + x1) / 2, (y0 + y1) / 2), max(2.0, (x1 - x0) / 7)
        draw.circle(middle, radius, fill=OUTLINES["anchor"], outline=_PAPER)
    return picture


def draw_map(view: View, scores: Sequence[float]) -> Image.Image:
    """Tokens coloured from dark, the lowest, to bright."""
    picture = view.picture.convert("L").convert("RGB")
    for box, value in zip(view.tokens, scaled(scores), strict=True):
        _blend(picture, box, heat(value), HEAT_OPACITY)
    return picture


def _cells(method: MethodView, view: View) -> Iterator[_Cell]:
    yield _Cell("as the vision tower gets it", _named(view, view.picture))
    for caption, scores in method.maps():
        grey = Image.new("RGB", view.picture.size, "#e4e4e4")
        yield _Cell(caption, grey if scores is None else _named(view, draw_map(view, scores)))
    for panel in method.panels:
        caption = "\n".join(panel.caption(len(view.tokens)))
        yield _Cell(caption, _named(view, draw_panel(view, panel)))


def _enlarged(view: View) -> View:
    """Scaled to the size of a cell, and at most to the width of the page."""
    width, height = view.picture.size
    factor = min(
        _CELL / (width * height) ** 0.5 * len(view.units) ** 0.5, (_WIDEST - 2 * _MARGIN) / width
    )

    def grown(box: Box) -> Box:
        left, top, right, bottom = (factor * edge for edge in box)
        return left, top, right, bottom

    size = (round(factor * width), round(factor * height))
    units = tuple(
        replace(unit, box=grown(unit.box), tokens=tuple(grown(box) for box in unit.tokens))
        for unit in view.units
    )
    return View(view.picture.resize(size, Image.Resampling.BICUBIC), units)


def _named(view: View, picture: Image.Image) -> Image.Image:
    """With the names of units above them, if there are several."""
    if len(view.units) > 1:
        picture = picture.copy()
        draw = ImageDraw.Draw(picture)
        for unit in view.units:
            left, top, right, _ = unit.box
            size = max(9, min(_TEXT, int((right - left) / 8)))
            draw.text((left, top - 2), unit.name, _INK, _font(size), anchor="lb")
    return picture


def _row(cells: Sequence[_Cell], width: int) -> Image.Image:
    """Pictures side by side, each under its caption."""
    wide, high = cells[0].picture.size
    font = _font(_TEXT)
    captions = ["\n".join(_wrapped(cell.caption, wide, font)) for cell in cells]
    room = max(caption.count("\n") + 1 for caption in captions) * (_TEXT + 5) + 4
    row = Image.new("RGB", (width, room + high + _MARGIN), _PAPER)
    draw = ImageDraw.Draw(row)
    for number, (cell, caption) in enumerate(zip(cells, captions, strict=True)):
        left = _MARGIN + number * (wide + _MARGIN)
        draw.text((left, 0), caption, _INK, font, spacing=4)
        row.paste(cell.picture, (left, room))
        frame = (left - 1, room - 1, left + wide, room + high)
        draw.rectangle(frame, outline=_FRAME)
    return row


def _text_row(text: str, width: int, size: int) -> Image.Image:
    lines = _wrapped(text, width - 2 * _MARGIN, _font(size))
    row = Image.new("RGB", (width, len(lines) * (size + 6) + 8), _PAPER)
    ImageDraw.Draw(row).text((_MARGIN, 8), "\n".join(lines), _INK, _font(size), spacing=4)
    return row


def _legend(width: int) -> Image.Image:
    """What colours mean, as far as the page is wide on one line or more."""
    font, side = _font(_TEXT), _TEXT
    entries: list[tuple[State | None, str]] = [*LEGEND, (None, DOT)]
    places, left, top = [], _MARGIN, 8
    for _, words in entries:
        length = side + 8 + int(font.getlength(words))
        if left > _MARGIN and left + length > width - _MARGIN:
            left, top = _MARGIN, top + side + 8
        places.append((left, top))
        left += length + 24
    row = Image.new("RGB", (width, top + side + 10), _PAPER)
    draw = ImageDraw.Draw(row)
    for (state, words), (x, y) in zip(entries, places, strict=True):
        box = (x, y, x + side, y + side)
        if state is None:
            draw.circle((x + side / 2, y + side / 2), side / 4, fill=OUTLINES["anchor"])
        elif state in OUTLINES:
            draw.rectangle(box, outline=OUTLINES[state], width=3)
        else:
            shade = round(255 * (1 - VEILS[state]))
            draw.rectangle(box, fill=(shade, shade, shade))
        draw.text((x + side + 8, y - 1), words, _INK, font)
    return row


def _wrapped(text: str, width: int, font: ImageFont.FreeTypeFont) -> list[str]:
    """Lines of a text, broken between words where they are wider than `width` pixels."""
    lines = []
    for paragraph in text.splitlines():
        line = ""
        for word in paragraph.split():
            longer = f"{line} {word}".strip()
            if line and font.getlength(longer) > width:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return lines


def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def _blend(picture: Image.Image, box: Box, colour: tuple[int, int, int], share: float) -> None:
    """Paint over the pixels of a box, as far as `share` says."""
    pixels = _pixels(box)
    under = picture.crop(pixels)
    picture.paste(Image.blend(under, Image.new("RGB", under.size, colour), share), pixels)


def _pixels(box: Box) -> tuple[int, int, int, int]:
    """Neighbouring boxes neither overlap nor leave a line between them."""
    left, top, right, bottom = (round(edge) for edge in box)
    return left, top, right, bottom

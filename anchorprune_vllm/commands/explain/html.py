# SPDX-License-Identifier: Apache-2.0
"""An explanation as one page that needs nothing else: no network, no scripts."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from anchorprune_vllm.commands.explain.explanation import (
    Explanation,
    MethodView,
    Panel,
    ranks,
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
from anchorprune_vllm.testing.media import as_data_url


def page(explanation: Explanation) -> str:
    """The whole page."""
    view = explanation.view
    blocks = "\n".join(
        f"<h2>{escape(each.method)}</h2>\n<div class=row>{''.join(_cells(each, explanation))}</div>"
        for each in explanation.methods
    )
    legend = "".join(
        f"<span><i class={state}></i>{escape(words)}</span>" for state, words in LEGEND
    )
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{escape(explanation.question)}</title>
<style>
{_style(view)}
</style>
<h1>{escape(explanation.question)}</h1>
<p>{escape(explanation.media)}, {escape(explanation.model)}</p>
<p class=legend>{legend}<span><i class=dot></i>{escape(DOT)}</span></p>
<p>Rest the pointer on a token for its numbers.</p>
{blocks}
</html>
"""


def _style(view: View) -> str:
    width, height = view.picture.size
    stroke = max(1.0, _token_width(view) / 10)
    veils = "\n".join(
        f".{state}{{fill:#000;fill-opacity:{veil};background:rgb(0 0 0/{veil})}}"
        for state, veil in VEILS.items()
    )
    outlines = "\n".join(
        f".{state}{{fill:transparent;stroke:{colour};stroke-width:{stroke:.2f};"
        f"border:3px solid {colour}}}"
        for state, colour in OUTLINES.items()
    )
    # A square view is as large as in the picture; a strip of frames takes the page.
    wide = round(min(1800, 340 * (width / height * len(view.units)) ** 0.5))
    return f"""body{{font:15px/1.4 system-ui,sans-serif;margin:24px;color:#1a1a1a}}
.row{{display:flex;flex-wrap:wrap;gap:18px}}
figure{{margin:0;width:{wide}px;max-width:100%}}
figcaption{{min-height:4.2em}}
svg{{width:100%;display:block;outline:1px solid #b0b4ba}}
svg{{background:url({as_data_url(view.picture)}) 0 0/100% 100%}}
text{{font:{_token_width(view):.1f}px sans-serif}}
.legend span{{margin-right:24px}}
.legend i{{display:inline-block;box-sizing:border-box;width:14px;height:14px;margin-right:6px}}
.dot{{fill:{OUTLINES["anchor"]};background:{OUTLINES["anchor"]};border-radius:50%}}
.heat{{fill-opacity:{HEAT_OPACITY}}}
{veils}
{outlines}"""


def _cells(method: MethodView, explanation: Explanation) -> Iterator[str]:
    view, notes = explanation.view, _notes(method, explanation)
    yield _figure(view, "as the vision tower gets it", "")
    for caption, scores in method.maps():
        marks = ""
        if scores is not None:
            colours = ("rgb({} {} {})".format(*heat(value)) for value in scaled(scores))
            marks = "".join(
                _token(box, f'class=heat fill="{colour}"', note)
                for box, colour, note in zip(view.tokens, colours, notes, strict=True)
            )
        yield _figure(view, caption, marks)
    for panel in method.panels:
        yield _figure(
            view,
            "<br>".join(escape(line) for line in panel.caption(len(view.tokens))),
            "".join(_panel_marks(view, panel, notes)),
        )


def _panel_marks(view: View, panel: Panel, notes: list[str]) -> Iterator[str]:
    inset = max(1.0, _token_width(view) / 10) / 2  # a stroke is half outside its box
    states = panel.states(len(view.tokens))
    for box, state, note in zip(view.tokens, states, notes, strict=True):
        left, top, right, bottom = box
        if state in OUTLINES:
            box = (left + inset, top + inset, right - inset, bottom - inset)
        yield _token(box, f"class={state}", f"{note}: {state}")
    for token in (token for anchor in panel.anchors for token in anchor.novel):
        left, top, right, bottom = view.tokens[token]
        yield (
            f'<circle class=dot cx="{(left + right) / 2:g}" cy="{(top + bottom) / 2:g}" '
            f'r="{(right - left) / 7:g}"/>'
        )


def _figure(view: View, caption: str, marks: str) -> str:
    width, height = view.picture.size
    names = ""
    if len(view.units) > 1:
        names = "".join(
            f'<text x="{unit.box[0]:g}" y="{unit.box[1] - 2:g}">{escape(unit.name)}</text>'
            for unit in view.units
        )
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}">{marks}{names}</svg></figure>\n'
    )


def _token(box: Box, attributes: str, note: str) -> str:
    left, top, right, bottom = box
    return (
        f'<rect {attributes} x="{left:.6g}" y="{top:.6g}" width="{right - left:.6g}" '
        f'height="{bottom - top:.6g}"><title>{escape(note)}</title></rect>'
    )


def _notes(method: MethodView, explanation: Explanation) -> list[str]:
    """What the pointer shows of each token."""
    notes = list(explanation.token_names)
    sizes = [len(unit.tokens) for unit in explanation.view.units]
    for name in ("relevance", "importance"):
        scores = getattr(method, name)
        if scores is not None:
            # Anchors are chosen by relevance in each unit, the context by importance in all.
            units = sizes if name == "relevance" else [len(scores)]
            notes = [
                f"{note}, {name} {score:.4g} (rank {rank})"
                for note, score, rank in zip(notes, scores, ranks(scores, units), strict=True)
            ]
    return notes


def _token_width(view: View) -> float:
    left, _, right, _ = view.tokens[0]
    return right - left

# SPDX-License-Identifier: Apache-2.0
"""What `anchorprune explain` found out, as plain numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from PIL import Image

PixelBox = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels of the view."""
State = Literal["anchor", "context", "merged", "dropped"]
EndedBy = Literal["novel tokens", "K_max"]
Scores = tuple[float, ...] | None
"""A signal of all candidates; None if it was not computed."""


@dataclass(frozen=True)
class UnitView:
    """An image, a crop or a frame in a view: its name, its place, and those of its tokens."""

    name: str
    box: PixelBox
    tokens: tuple[PixelBox, ...]


@dataclass(frozen=True)
class View:
    """All units of an item, laid out in one image."""

    image: Image.Image
    units: tuple[UnitView, ...]

    @property
    def tokens(self) -> list[PixelBox]:
        """The boxes of all candidates, in order."""
        return [box for unit in self.units for box in unit.tokens]


@dataclass(frozen=True)
class UnitAnchor:
    """Where the adaptive rule ended the anchor of a unit."""

    unit: int
    budget: int
    """K_u"""
    minimum: int
    """K_min"""
    size: int
    """K_rel"""
    maximum: int
    """K_max"""
    novel: tuple[int, ...]
    """The tokens of the anchor that looked new, by falling relevance."""
    ended_by: EndedBy


@dataclass(frozen=True)
class Panel:
    """What a method keeps at one budget."""

    budget: str
    indices: tuple[int, ...]
    """The kept tokens, in the order of the language model."""
    is_anchor: tuple[bool, ...]
    anchors: tuple[UnitAnchor, ...] = ()
    """The anchors of the units that have one."""
    summed: tuple[int, ...] | None = None
    """If the method merges tokens, all that are part of a kept row; else None."""

    def states(self, tokens: int) -> list[State]:
        """Return what became of each candidate."""
        states: list[State] = ["dropped"] * tokens
        for token in self.summed or ():
            states[token] = "merged"
        for token, is_anchor in zip(self.indices, self.is_anchor, strict=True):
            states[token] = "anchor" if is_anchor else "context"
        return states

    def caption(self, tokens: int) -> list[str]:
        """Return what became of the candidates in words, a line each."""
        kept = len(self.indices)
        line = f"{kept} of {tokens} tokens ({kept / tokens:.1%})"
        if self.summed is not None:
            merged = len(set(self.summed) - set(self.indices))
            sums = f"sums of tokens, outlined where each stands; half dimmed: {merged} summed up"
            return [line, sums]
        if not self.anchors:
            return [line, "no anchor: all by the method's own rule"]
        anchor = sum(self.is_anchor)
        return [f"{line}: anchor {anchor}, context {kept - anchor}", _how_ended(self.anchors)]


@dataclass(frozen=True)
class MethodView:
    """A method on the item: the signals it chose by, and what it keeps at each budget."""

    method: str
    looks_at_question: bool
    relevance: Scores
    importance: Scores
    panels: tuple[Panel, ...]

    def maps(self) -> list[tuple[str, Scores]]:
        """Return the signals with their captions."""
        unused = "not looked at by this method"
        no_relevance = "no question" if self.looks_at_question else unused
        return [
            (_range("relevance", self.relevance, no_relevance), self.relevance),
            (_range("importance", self.importance, unused), self.importance),
        ]


@dataclass(frozen=True)
class Explanation:
    """What each method keeps of an image or video for a question."""

    model: str
    media: str
    question: str
    view: View
    methods: tuple[MethodView, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all but the pixels; token numbers count the candidates of all units, in order."""
        view = {"width": self.view.image.width, "height": self.view.image.height}
        return {
            "model": self.model,
            "media": self.media,
            "question": self.question,
            "view": {**view, "units": [asdict(unit) for unit in self.view.units]},
            "methods": [asdict(method) for method in self.methods],
        }


def ranks(scores: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Rank the scores of each part from 1, the highest; of equal ones, the first comes first.

    The parts, such as units, follow one another and have these sizes.
    """
    rank = [0] * len(scores)
    start = 0
    for size in sizes:
        part = range(start, start + size)
        for place, token in enumerate(sorted(part, key=lambda token: -scores[token])):
            rank[token] = place + 1
        start += size
    return rank


def _range(name: str, scores: Scores, missing: str) -> str:
    if scores is None:
        return f"{name}: {missing}"
    return f"{name}: {min(scores):.3g} (dark) to {max(scores):.3g} (bright)"


def _how_ended(anchors: Sequence[UnitAnchor]) -> str:
    """Say how large the anchors may be, and what ended them."""
    minimum, maximum, size = (
        _span([getattr(anchor, name) for anchor in anchors])
        for name in ("minimum", "maximum", "size")
    )
    bounds = f"K_min {minimum}, K_max {maximum}"
    by_novel = sum(anchor.ended_by == "novel tokens" for anchor in anchors)
    if len(anchors) > 1:
        return (
            f"{len(anchors)} units with {size} each; {bounds}; {by_novel} ended at a token that "
            f"looked new, {len(anchors) - by_novel} at K_max"
        )
    novel = len(anchors[0].novel)
    if by_novel:
        return f"{bounds}; ended at {size}: {novel} tokens looked new"
    return f"{bounds}; ended at K_max: {novel} looked new"


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"

# SPDX-License-Identifier: Apache-2.0
"""What `anchorprune explain` found out, in plain numbers, and its words for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from anchorprune_vllm.commands.explain.views import View

State = Literal["anchor", "context", "merged", "dropped"]
EndedBy = Literal["novel tokens", "K_max"]


@dataclass(frozen=True)
class UnitAnchor:
    """Where the adaptive rule ended the anchor of one unit."""

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
    """Tokens of the anchor that looked new, by falling relevance."""
    ended_by: EndedBy


@dataclass(frozen=True)
class Panel:
    """What one method keeps at one budget."""

    budget: str
    indices: tuple[int, ...]
    """As the language model gets them."""
    is_anchor: tuple[bool, ...]
    anchors: tuple[UnitAnchor, ...] = ()
    """Of the units that have one."""
    summed: tuple[int, ...] | None = None
    """Of a method that merges: the tokens that are part of some row. None: rows are tokens."""

    def states(self, tokens: int) -> list[State]:
        """Of each candidate."""
        found: list[State] = ["dropped"] * tokens
        for token in self.summed or ():
            found[token] = "merged"
        for token, is_anchor in zip(self.indices, self.is_anchor, strict=True):
            found[token] = "anchor" if is_anchor else "context"
        return found

    def caption(self, tokens: int) -> list[str]:
        """Lines under the picture."""
        kept = len(self.indices)
        lines = [f"{kept} of {tokens} tokens ({kept / tokens:.1%})"]
        if self.summed is not None:
            merged = len(set(self.summed) - set(self.indices))
            lines += [
                f"sums of tokens, outlined where each stands; half dimmed: {merged} summed up"
            ]
        elif self.anchors:
            anchor = sum(self.is_anchor)
            lines[0] += f": anchor {anchor}, context {kept - anchor}"
            lines.append(_ends(self.anchors))
        else:
            lines.append("no anchor: all by the method's own rule")
        return lines


@dataclass(frozen=True)
class MethodView:
    """One method on the item: what it chose by, and what it keeps."""

    method: str
    looks_at_question: bool
    relevance: tuple[float, ...] | None
    importance: tuple[float, ...] | None
    panels: tuple[Panel, ...]

    def maps(self) -> list[tuple[str, tuple[float, ...] | None]]:
        """The signals, each under a caption."""
        missing = "no question" if self.looks_at_question else "not looked at by this method"
        return [
            (_range("relevance", self.relevance, missing), self.relevance),
            (
                _range("importance", self.importance, "not looked at by this method"),
                self.importance,
            ),
        ]


@dataclass(frozen=True)
class Explanation:
    """All of it."""

    model: str
    media: str
    question: str
    view: View
    methods: tuple[MethodView, ...]

    @cached_property
    def token_names(self) -> list[str]:
        """Of each candidate: its number, and where it is."""
        places = [(unit, box) for unit in self.view.units for box in unit.tokens]
        several = len(self.view.units) > 1
        return [
            f"token {number}" + (f" in {unit.name}" if several else "")
            for number, (unit, _) in enumerate(places)
        ]

    def to_json(self) -> dict[str, Any]:
        """For machines. Token numbers count the candidates of all units, in order."""
        return {
            "model": self.model,
            "media": self.media,
            "question": self.question,
            "view": {
                "width": self.view.picture.width,
                "height": self.view.picture.height,
                "units": [
                    {"name": unit.name, "box": unit.box, "tokens": unit.tokens}
                    for unit in self.view.units
                ],
            },
            "methods": [asdict(each) for each in self.methods],
        }


def scaled(scores: Sequence[float]) -> list[float]:
    """Stretched to 0..1; all 0 if they are all equal."""
    low, high = min(scores), max(scores)
    return [(score - low) / ((high - low) or 1) for score in scores]


def ranks(scores: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """1 for the highest of each part; of equal ones the first comes first, as in selection.

    `sizes`: of the parts, one behind the other, such as units.
    """
    rank = [0] * len(scores)
    start = 0
    for size in sizes:
        part = range(start, start + size)
        for place, token in enumerate(sorted(part, key=lambda token: -scores[token])):
            rank[token] = place + 1
        start += size
    return rank


def _range(name: str, scores: tuple[float, ...] | None, missing: str) -> str:
    if scores is None:
        return f"{name}: {missing}"
    return f"{name}: {min(scores):.3g} (dark) to {max(scores):.3g} (bright)"


def _ends(anchors: tuple[UnitAnchor, ...]) -> str:
    """Where the rule stopped, in words."""
    if len(anchors) == 1:
        (one,) = anchors
        bounds = f"K_min {one.minimum}, K_max {one.maximum}"
        if one.ended_by == "novel tokens":
            return f"{bounds}; ended at {one.size}: {len(one.novel)} tokens looked new"
        return f"{bounds}; ended at K_max: {len(one.novel)} looked new"
    sizes = _span([one.size for one in anchors])
    bounds = (
        f"K_min {_span([one.minimum for one in anchors])}, "
        f"K_max {_span([one.maximum for one in anchors])}"
    )
    by_novel = sum(one.ended_by == "novel tokens" for one in anchors)
    return (
        f"{len(anchors)} units with {sizes} each; {bounds}; ended by tokens that looked new in "
        f"{by_novel}, at K_max in {len(anchors) - by_novel}"
    )


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"

# SPDX-License-Identifier: Apache-2.0
"""Colours that the picture and the page share, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping

from anchorprune_vllm.commands.explain.explanation import State

ANCHOR = "#ff6a00"
CONTEXT = "#0095ff"
OUTLINES: Mapping[State, str] = {"anchor": ANCHOR, "context": CONTEXT}
VEILS: Mapping[State, float] = {"dropped": 0.72, "merged": 0.36}
"""How much of a token's pixels is black."""
HEAT_OPACITY = 0.72

LEGEND: tuple[tuple[State, str], ...] = (
    ("anchor", "anchor: most relevant to the question"),
    ("context", "context, or what another method keeps"),
    ("merged", "summed into a kept one"),
    ("dropped", "dropped"),
)
DOT = "looked new: enough of these end the anchor"

_HEAT = ((24, 15, 60), (98, 25, 110), (188, 55, 84), (243, 132, 40), (252, 245, 150))


def heat(value: float) -> tuple[int, int, int]:
    """0..1 to a colour from dark to bright."""
    place = value * (len(_HEAT) - 1)
    low = min(int(place), len(_HEAT) - 2)
    share = place - low
    red, green, blue = (
        round(a + (b - a) * share) for a, b in zip(_HEAT[low], _HEAT[low + 1], strict=True)
    )
    return red, green, blue

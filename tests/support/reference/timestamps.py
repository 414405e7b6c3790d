# SPDX-License-Identifier: Apache-2.0
"""The text that stays of a video whose frames have timestamps, as the README states it."""

from __future__ import annotations


def text_that_stays(text: list[list[int]], frames: set[int], kept: int) -> list[int]:
    """Places of the text that stays if so many rows are kept, ascending.

    As many frames keep their text as could keep a row: those that do keep one (`frames`), and then
    the first of the others. Room is left for the longest of the texts.

    Args:
        text: of each frame, the places of its text.
        frames: those that keep a row.
        kept: rows that are kept.
    """
    room = sum(sorted(map(len, text), reverse=True)[:kept])
    first = [place for frame in sorted(frames) for place in text[frame]]
    others = [place for frame, places in enumerate(text) if frame not in frames for place in places]
    return sorted([*first, *others][:room])

# SPDX-License-Identifier: Apache-2.0
"""Text among the frames of a video: whose it is, how much stays, and where the worker puts it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from anchorprune_vllm.frame_texts import frame_of_tokens, item_length
from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.worker.frame_text import put_among_text
from tests.support.host_reads import NoHostReads

VIDEO, START, END, BEGIN_VIDEO, END_VIDEO = 90, 91, 92, 93, 94
DIMENSION, LEVELS = 3, 2


def timestamp(second: int) -> list[int]:
    return [int(digit) for digit in str(second)]


def before_frames(seconds: Sequence[int], rows: Sequence[int]) -> tuple[PromptLayout, list[int]]:
    """Timestamps before their frames, as Qwen3-VL has them; and the frame of each token."""
    tokens, frames = [], []
    for frame, (second, count) in enumerate(zip(seconds, rows, strict=True)):
        part = [*timestamp(second), START, *[VIDEO] * count, END]
        tokens += part
        frames += [frame] * len(part)
    return layout_of(tokens, margin=0), frames


def behind_frames(seconds: Sequence[int], rows: Sequence[int]) -> tuple[PromptLayout, list[int]]:
    """Timestamps behind their frames, and tokens around the video, as GLM-4V has them."""
    tokens, frames = [BEGIN_VIDEO], [len(rows)]
    for frame, (second, count) in enumerate(zip(seconds, rows, strict=True)):
        part = [START, *[VIDEO] * count, END, *timestamp(second)]
        tokens += part
        frames += [frame] * len(part)
    return layout_of([*tokens, END_VIDEO], margin=1), [*frames, len(rows)]


def layout_of(tokens: Sequence[int], margin: int) -> PromptLayout:
    found = PromptLayout.of(tokens, [token == VIDEO for token in tokens])
    return PromptLayout(found.pieces, margin)


def embed_text(ids: Tensor) -> Tensor:
    """An embedding that tells the token."""
    return 1000.0 + ids[:, None].expand(-1, DIMENSION)


def by_hand(layout: PromptLayout, frames: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Return which tokens stay, by the rule as it is written down."""
    is_row = layout.is_embedding()
    rows = [place for place, flag in enumerate(is_row) if flag]
    chosen = {rows[index] for index in kept}
    text_of = {
        frame: [i for i, owner in enumerate(frames) if owner == frame and not is_row[i]]
        for frame in range(len(layout.runs) + 1)
    }
    outside = text_of.pop(len(layout.runs))
    longest = sorted((len(text) for text in text_of.values()), reverse=True)
    room = sum(longest[: min(len(kept), len(longest))])
    with_rows = {frames[place] for place in chosen}
    others = [frame for frame in text_of if frame not in with_rows]
    text = [i for frame in with_rows for i in text_of[frame]]
    text += [i for frame in others for i in text_of[frame]][: room - len(text)]
    assert len(text) == room
    return sorted([*chosen, *outside, *text])


@pytest.mark.parametrize("make", [before_frames, behind_frames])
@pytest.mark.parametrize("seconds", [[0, 1, 2], [8, 9, 10, 11], [5, 5], [0, 0, 7]])
def test_frame_of_each_token(make, seconds: list[int]) -> None:
    layout, frames = make(seconds, [2] * len(seconds))
    assert frame_of_tokens(layout) == frames


@pytest.mark.parametrize(
    ("kept", "length"), [(1, 1 + 4), (2, 2 + 8), (3, 3 + 11), (4, 4 + 14), (7, 7 + 14), (8, 22)]
)
def test_length_is_known_before_selection(kept: int, length: int) -> None:
    """Room for the text of as many frames as may keep a row, the longest ones."""
    layout, _ = before_frames([8, 9, 10, 11], [2, 2, 2, 2])
    assert item_length(layout, kept) == length


def test_text_outside_of_frames_always_stays() -> None:
    layout, _ = behind_frames([1, 2, 3], [2, 2, 2])
    assert item_length(layout, 1) == 1 + 2 + 3
    rows, places = put_among_text(torch.zeros(1, DIMENSION), torch.tensor([4]), layout, embed_text)
    ids = [layout.tokens()[place] for place in places]
    assert ids == [BEGIN_VIDEO, START, VIDEO, END, 3, END_VIDEO]
    assert len(rows) == 6


def test_as_many_rows_as_frames_keep_all_text() -> None:
    layout, _ = before_frames([0, 1, 2], [4, 4, 4])
    _, places = put_among_text(
        torch.zeros(3, DIMENSION), torch.tensor([0, 1, 2]), layout, embed_text
    )
    text = [place for place, flag in enumerate(layout.is_embedding()) if not flag]
    assert set(text) <= set(places.tolist())


@pytest.mark.parametrize("make", [before_frames, behind_frames])
@pytest.mark.parametrize("seed", range(40))
def test_rows_stand_where_they_would(make, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 7)
    seconds = sorted(rng.sample(range(rng.choice([9, 15, 120])), count))
    layout, frames = make(seconds, [rng.randint(1, 5) for _ in range(count)])
    kept = sorted(rng.sample(range(layout.embeddings), rng.randint(1, layout.embeddings - 1)))
    rows = torch.arange(len(kept)).float()[:, None].expand(-1, DIMENSION + LEVELS)

    with NoHostReads():
        item, places = put_among_text(rows, torch.tensor(kept), layout, embed_text)

    expected = by_hand(layout, frames, kept)
    assert places.tolist() == expected
    assert len(item) == len(expected) == item_length(layout, len(kept))
    is_row, tokens, number = layout.is_embedding(), layout.tokens(), 0
    for row, place in zip(item.tolist(), expected, strict=True):
        if is_row[place]:
            assert row == [number] * (DIMENSION + LEVELS)
            number += 1
        else:
            assert row == [1000 + tokens[place]] * DIMENSION + [0] * LEVELS
    assert number == len(kept)


def test_rows_have_memory_of_their_own() -> None:
    layout, _ = before_frames([0, 1], [2, 2])
    rows = torch.zeros(100, DIMENSION)[:2]
    item, _ = put_among_text(rows, torch.tensor([0, 3]), layout, embed_text)
    assert item.untyped_storage().nbytes() == item.numel() * item.element_size()

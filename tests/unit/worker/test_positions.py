# SPDX-License-Identifier: Apache-2.0
"""Positions placed step by step equal those of the unpruned prompt, however the steps are cut."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anchorprune_vllm.worker.positions import (
    CHANNELS,
    MediaPositions,
    MediaSpan,
    answer_delta,
    place_media,
    prompt_positions,
    with_positions,
)
from tests.support.host_reads import NoHostReads

IMAGE, VIDEO, SIZE = 7, 8, 4


@dataclass
class Item:
    """Media in a prompt: the kept ones of an unpruned layout of positions."""

    token: int
    relative: Tensor  # [K, CHANNELS]
    extent: int
    offset: int = 0

    def rows(self, dtype: torch.dtype) -> Tensor:
        marks = torch.arange(len(self.relative))[:, None].expand(-1, SIZE)
        return with_positions(marks.to(dtype), MediaPositions(self.relative))


@dataclass
class Prompt:
    """A prompt with the positions that each of its tokens must get."""

    ids: list[int]
    items: list[Item]
    expected: list[list[int]]
    after: int

    @classmethod
    def of(cls, parts: list[int | Item]) -> Prompt:
        """Parts are numbers of text tokens, or items."""
        ids: list[int] = []
        expected: list[list[int]] = []
        position = 0
        for part in parts:
            if isinstance(part, int):
                ids += [1] * part
                expected += [[position + i] * CHANNELS for i in range(part)]
                position += part
            else:
                part.offset = len(ids)
                ids += [part.token] * len(part.relative)
                expected += (part.relative + position).tolist()
                position += part.extent
        items = [part for part in parts if isinstance(part, Item)]
        return cls(ids, items, expected, position)

    def spans(self) -> list[MediaSpan]:
        return [MediaSpan(i.offset, len(i.relative), i.extent) for i in self.items]

    def window(self, start: int, end: int, dtype: torch.dtype) -> list[Tensor]:
        """Rows of the placeholders in [start, end), as vLLM's runner gathers them."""
        parts = []
        for item in self.items:
            first = max(start - item.offset, 0)
            last = min(end - item.offset, len(item.relative))
            if first < last:
                parts.append(item.rows(dtype)[first:last])
        return parts


def check_window(prompt: Prompt, positions: Tensor, start: int, end: int) -> None:
    assert positions[:, start:end].T.tolist() == prompt.expected[start:end]


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    rng = random.Random(draw(st.integers(0, 2**32)))
    parts: list[int | Item] = []
    for _ in range(draw(st.integers(1, 5))):
        if rng.random() < 0.6:
            parts.append(rng.randrange(1, 9))
        else:
            extent = rng.choice([1, 3, 30, 300, 70_000])
            kept = rng.randrange(1, 9)
            relative = torch.tensor(
                [[rng.randrange(extent) for _ in range(CHANNELS)] for _ in range(kept)]
            )
            parts.append(Item(rng.choice([IMAGE, VIDEO]), relative, extent))
    return Prompt.of(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_cut_gives_the_positions_of_the_unpruned_prompt(dtype: torch.dtype) -> None:
    @settings(max_examples=150, deadline=None)
    @given(prompts(), st.randoms())
    def check(prompt: Prompt, rng: random.Random) -> None:
        length = len(prompt.ids)
        positions, delta = prompt_positions(length, prompt.spans())
        assert delta == prompt.after - length
        start = rng.randrange(length)  # a prefix hit, perhaps inside an item
        restarts = rng.randrange(3)
        while start < length:
            end = min(length, start + rng.randrange(1, 12))
            rows = prompt.window(start, end, dtype)
            clean = place_media(prompt.ids, [IMAGE, VIDEO], rows, positions, start)
            check_window(prompt, positions, start, end)
            assert [len(part) for part in clean] == [len(part) for part in rows]
            assert all(part.shape[1] == SIZE for part in clean)
            if rng.random() < 0.5:  # a draft model looks one token further
                ahead = prompt.window(start + 1, end + 1, dtype)
                place_media(prompt.ids, [IMAGE, VIDEO], ahead, positions, start)
                check_window(prompt, positions, start, end)
            start = end
            if start == length and restarts:  # preempted: from some earlier token on
                restarts -= 1
                start = rng.randrange(length)
            assert answer_delta(positions, length) == prompt.after - length
        assert place_media(prompt.ids, [IMAGE], [], positions, length) == []  # decoding

    check()


def test_an_answer_may_hold_the_id_of_a_placeholder() -> None:
    """After a preemption the second runner gives prompt and answer, and no column for more."""
    item = Item(IMAGE, torch.tensor([[0, 0, 0], [0, 5, 2], [0, 6, 1]]), extent=40)
    prompt = Prompt.of([4, item])
    answer = [IMAGE, 1, IMAGE]
    ids = torch.tensor(prompt.ids + answer)
    stored, delta = prompt_positions(len(ids), prompt.spans())
    assert stored.shape == (3, len(ids))
    assert delta == 44 - 7
    for start, end in ((0, 5), (5, 7)):
        place_media(ids, [IMAGE], prompt.window(start, end, torch.float32), stored, start)
    # A row that meets the answer's placeholder changes nothing: only a token that waits is placed.
    place_media(ids, [IMAGE], prompt.window(6, 7, torch.float32), stored, 7)
    assert stored.T.tolist() == [*prompt.expected, [44] * 3, [45] * 3, [46] * 3]


def test_text_alone() -> None:
    positions, delta = prompt_positions(5, [])
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == answer_delta(positions, 5) == 0


def test_placing_waits_for_no_device() -> None:
    """On the meta device nothing has a value that could be read."""
    item = Item(IMAGE, torch.tensor([[0, 0, 0], [0, 5, 2]]), extent=9)
    rows = [item.rows(torch.bfloat16).to("meta")]
    positions = torch.empty(3, 6, dtype=torch.long, device="meta")
    ids = torch.empty(6, dtype=torch.long, device="meta")
    with NoHostReads():
        (clean,) = place_media(ids, [IMAGE], rows, positions, 2)
    assert clean.shape == (2, SIZE)

# SPDX-License-Identifier: Apache-2.0
"""An item's part of the prompt: what are its units, and what stays."""

from __future__ import annotations

import pytest

from anchorprune_vllm.prompt_layout import PromptLayout

IMAGE, ROW, TAG, END = 7, 8, 9, 10


def layout(*tokens: int) -> PromptLayout:
    return PromptLayout.of(tokens, [token == IMAGE for token in tokens])


ALONE = layout(*[IMAGE] * 6)
FRAMED = layout(TAG, *[IMAGE] * 6, END)
ROWS = layout(*[IMAGE, IMAGE, ROW] * 2, IMAGE, IMAGE, END)
TILES = layout(TAG, *[IMAGE] * 4, TAG, TAG, *[IMAGE] * 2, END)
UNLIKE = layout(*[IMAGE] * 4, TAG, *[IMAGE] * 2, ROW, *[IMAGE] * 2)


def test_units(subtests: pytest.Subtests) -> None:
    """The same single token between all runs ends rows of one image; anything else divides it."""
    for item, sizes, is_in_rows in (
        (ALONE, (6,), False),
        (FRAMED, (6,), False),
        (ROWS, (6,), True),
        (TILES, (4, 2), False),
        (UNLIKE, (4, 2, 2), False),
    ):
        with subtests.test(item=item, sizes=sizes, is_in_rows=is_in_rows):
            assert (item.unit_sizes, item.is_in_rows) == (sizes, is_in_rows)
            assert item.embeddings == sum(sizes)


def test_what_stays(subtests: pytest.Subtests) -> None:
    """Row ends go; text between units stays, also beside a unit that keeps nothing."""
    for item, kept, left in (
        (ALONE, 2, [IMAGE, IMAGE]),
        (FRAMED, 2, [TAG, IMAGE, IMAGE, END]),
        (ROWS, 3, [IMAGE, IMAGE, IMAGE, END]),
        (TILES, 3, [TAG, IMAGE, IMAGE, TAG, TAG, IMAGE, END]),
        (TILES, 1, [TAG, IMAGE, TAG, TAG, END]),
    ):
        with subtests.test(item=item, kept=kept, left=left):
            stays = item.stays(item.shares(kept))
            assert [token for token, stay in zip(item.tokens(), stays, strict=True) if stay] == left


def test_without_a_mask_all_tokens_are_embeddings() -> None:
    assert PromptLayout.of([IMAGE, ROW, IMAGE]).runs == (3,)


def test_there_and_back(subtests: pytest.Subtests) -> None:
    for item in (ALONE, FRAMED, ROWS, TILES):
        with subtests.test(item=item):
            tensor = item.to_tensor()
            assert PromptLayout.from_tensor(tensor) == item
            assert len(item.tokens()) == len(item.is_embedding()) == item.length
            assert tensor.device.type == "cpu"

# SPDX-License-Identifier: Apache-2.0
"""Native positions: every token of a pruned prompt keeps the position it has in the unpruned one.

They are handled like those of vLLM's M-RoPE models. The positions of the whole prompt, one row per
channel, are made when the request arrives. They are completed as the encoder's rows are used, which
carry their own positions.

The positions of text are known at once, because they depend on sizes alone. A media token waits for
the encoder, and until then it holds -1 - base, a negative number, where base is the first position
of its item. Each token thus shows whether it has been placed and what is missing, and placing works
alike for whole items, for chunks of them, for items without a token between them, and for a request
that starts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.worker.embedding_payload import append_numbers, split_numbers

CHANNELS = 3  # M-RoPE has time, height and width, and vLLM supports no fewer channels
_DIGITS = 3  # enough for positions below 2 ** 24


class MediaSpan(NamedTuple):
    """The place of one image or video in the pruned prompt."""

    offset: int
    """The index of its first placeholder."""
    kept: int
    """The number of its placeholders."""
    extent: int
    """The number of positions that it takes unpruned; text after it begins at base + extent."""
    text: Tensor | None = None
    """The positions [CHANNELS, kept] of the text among its embeddings, relative to its first
    position, with -1 for embeddings; None if there is no text."""


class MediaPositions(NamedTuple):
    """The positions of the tokens of one item, relative to its first position."""

    relative: Tensor
    """The relative positions, int64 [N, CHANNELS]."""

    @classmethod
    def in_line(cls, tokens: int) -> MediaPositions:
        """Return consecutive positions, the same in all channels."""
        return cls.at(torch.arange(tokens, device="cpu"))

    @classmethod
    def at(cls, places: Tensor) -> MediaPositions:
        """Return the given positions [N], the same in all channels."""
        return cls(places[:, None].expand(-1, CHANNELS))

    def of(self, indices: Tensor) -> MediaPositions:
        """Return the positions of the tokens with the given indices [K], on the indices' device."""
        return MediaPositions(to_device(self.relative, indices.device)[indices])


def prompt_positions(length: int, spans: Sequence[MediaSpan]) -> tuple[Tensor, int]:
    """Return the positions of a prompt before its media are encoded, and their delta in vLLM.

    The positions are [CHANNELS, length]. If the prompt ends in an item, there is one more column
    with the position of the first answer token, because nothing else in the prompt determines it.
    `answer_delta` reads it.
    """
    parts: list[Tensor] = []
    at = position = 0
    for span in sorted(spans, key=lambda span: span.offset):
        text = span.offset - at
        parts.append(_in_all_channels(torch.arange(position, position + text, device="cpu")))
        base = position + text
        parts.append(_in_all_channels(torch.full((span.kept,), -1 - base, device="cpu")))
        if span.text is not None:
            parts[-1] = torch.where(span.text < 0, parts[-1], base + span.text)
        position = base + span.extent
        at = span.offset + span.kept
    ends_in_media = bool(spans) and at == length
    end = torch.arange(position, position + length - at + ends_in_media, device="cpu")
    return torch.cat([*parts, _in_all_channels(end)], dim=1), position - at


def _in_all_channels(positions: Tensor) -> Tensor:
    return positions.expand(CHANNELS, -1)


def answer_delta(positions: Tensor, length: int) -> int:
    """Return the delta of a prompt of `length` tokens from the result of `prompt_positions`.

    `positions` must be on the host: otherwise reading them would wait for the device.
    """
    has_answer_column = positions.shape[1] > length
    return int(positions[0, -1]) + (not has_answer_column) - length


def with_positions(rows: Tensor, positions: MediaPositions) -> Tensor:
    """Return an item's rows [K, H] with their positions appended as extra channels."""
    return append_numbers(rows, to_device(positions.relative, rows.device), _DIGITS)


def place_media(
    input_ids: Sequence[int] | Tensor,
    media_tokens: Sequence[int],
    rows: Sequence[Tensor],
    positions: Tensor,
    num_computed: int,
) -> list[Tensor]:
    """Write the positions of the media tokens whose rows are used in this step.

    The host waits only if the rows are on a device and the positions are not.

    Args:
        input_ids: The whole prompt, possibly followed by a part of the answer.
        media_tokens: The token ids of placeholders.
        rows: Results of `with_positions`, whole items or parts of them, in the order of the prompt
            from `num_computed` on.
        positions: The result of `prompt_positions`, or what this function left of it; it is
            modified in place.
        num_computed: The number of tokens of the prompt that earlier steps have computed.

    Returns:
        The rows without the channels of their positions.
    """
    if not rows:
        return []

    # 1. Read the positions that the rows carry.
    split = [split_numbers(part, CHANNELS, _DIGITS) for part in rows]
    relative = torch.cat([carried for _, carried in split]).to(positions.device).T

    # 2. The n-th row belongs to the n-th placeholder from `num_computed` on. The rows of a draft
    #    model begin one token later, so they meet tokens that are already placed and stay so.
    ids = torch.as_tensor(input_ids, device=positions.device)[num_computed:]
    is_media = torch.isin(ids, to_device(media_tokens, ids.device))
    row = is_media.cumsum(0) - 1
    count = relative.shape[1]
    now = positions[:, num_computed : len(input_ids)]
    # Only a waiting token is placed, because an answer may contain the id of a placeholder too.
    waits = is_media & (row < count) & (now[0] < 0)
    now[:] = torch.where(waits, -1 - now + relative[:, row.clamp(0, count - 1)], now)
    return [clean for clean, _ in split]

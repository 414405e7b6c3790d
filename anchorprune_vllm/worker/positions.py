# SPDX-License-Identifier: Apache-2.0
"""Native positions: every token of a pruned prompt keeps the position it has in the unpruned one.

They go the way of vLLM's M-RoPE models: one row of positions per channel for the whole prompt, made
when the request arrives, and corrected by what the encoder's rows carry as they are used.

Text is placed at once, as it depends on sizes alone. A media token waits for the encoder: until
then it holds -1 - base, a negative number, where base is the first position of its item. So a token
tells by itself whether it has been placed and what is missing, and placing is the same for whole
items, chunks of them, items without a token between them, and a request that starts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.worker.embedding_payload import append_numbers, split_numbers

CHANNELS = 3  # of M-RoPE: time, height, width. vLLM has no fewer.
_DIGITS = 3  # positions below 2 ** 24


class MediaSpan(NamedTuple):
    """One item in the prompt."""

    offset: int
    """Its first placeholder."""
    kept: int
    """Placeholders."""
    extent: int
    """Positions that it takes unpruned: text after it goes on at base + extent."""
    text: Tensor | None = None
    """[CHANNELS, kept]: where the text among its embeddings is, seen from its first position; -1
    for embeddings. None: there is no text."""


class MediaPositions(NamedTuple):
    """Where the tokens of one item are, seen from its first position."""

    relative: Tensor
    """[N, CHANNELS] int64."""

    @classmethod
    def in_line(cls, tokens: int) -> MediaPositions:
        """One position after the other, the same in all channels."""
        return cls.at(torch.arange(tokens, device="cpu"))

    @classmethod
    def at(cls, places: Tensor) -> MediaPositions:
        """Given positions [N], the same in all channels."""
        return cls(places[:, None].expand(-1, CHANNELS))

    def of(self, indices: Tensor) -> MediaPositions:
        """Those of some tokens, given by indices [K] on any device."""
        return MediaPositions(to_device(self.relative, indices.device)[indices])


def prompt_positions(length: int, spans: Sequence[MediaSpan]) -> tuple[Tensor, int]:
    """Positions of a prompt before its media are encoded, and what vLLM calls their delta.

    Returns [CHANNELS, length], and one column more if the prompt ends in an item: the position of
    the first answer token, which nothing else in the prompt tells then. `answer_delta` reads it.
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
    """The delta of a prompt of so many tokens, from what `prompt_positions` made of it.

    On the host, or reading it would wait for a device.
    """
    has_answer_column = positions.shape[1] > length
    return int(positions[0, -1]) + (not has_answer_column) - length


def with_positions(rows: Tensor, positions: MediaPositions) -> Tensor:
    """Rows [K, H] of an item with their positions as numbers behind them."""
    return append_numbers(rows, to_device(positions.relative, rows.device), _DIGITS)


def place_media(
    input_ids: Sequence[int] | Tensor,
    media_tokens: Sequence[int],
    rows: Sequence[Tensor],
    positions: Tensor,
    num_computed: int,
) -> list[Tensor]:
    """Place the media tokens whose rows are used in this step.

    The host waits only if the rows are on a device and the positions are not.

    Args:
        input_ids: the whole prompt, perhaps with a part of the answer behind it.
        media_tokens: ids of placeholders.
        rows: of `with_positions`, whole items or parts of them, in the order of the prompt from
            `num_computed` on.
        positions: of `prompt_positions`, or as this function left them. Changed in place.
        num_computed: tokens of the prompt that earlier steps have computed.

    Returns:
        The rows without their channels.
    """
    if not rows:
        return []

    # 1. What the rows carry.
    split = [split_numbers(part, CHANNELS, _DIGITS) for part in rows]
    relative = torch.cat([carried for _, carried in split]).to(positions.device).T

    # 2. The n-th row belongs to the n-th placeholder from `num_computed` on. A draft model's rows
    #    begin one token later: then the rows meet tokens that are placed already, and stay so.
    ids = torch.as_tensor(input_ids, device=positions.device)[num_computed:]
    is_media = torch.isin(ids, to_device(media_tokens, ids.device))
    row = is_media.cumsum(0) - 1
    count = relative.shape[1]
    now = positions[:, num_computed : len(input_ids)]
    # Only a token that waits is placed: an answer may hold the id of a placeholder as well.
    waits = is_media & (row < count) & (now[0] < 0)
    now[:] = torch.where(waits, -1 - now + relative[:, row.clamp(0, count - 1)], now)
    return [clean for clean, _ in split]

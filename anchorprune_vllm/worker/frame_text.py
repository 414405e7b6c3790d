# SPDX-License-Identifier: Apache-2.0
"""Embed the text between the frames of a video together with the rows that are kept of them.

`frame_texts.py` says which frames keep their text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anchorprune_vllm.frame_texts import frame_of_tokens, item_length
from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.selection.device import to_device


def put_among_text(
    rows: Tensor, indices: Tensor, layout: PromptLayout, embed_text: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Put the kept rows of a video in their places among its text.

    The host reads nothing from the device.

    Args:
        rows: The kept rows, [K, H].
        indices: The indices [K] of these rows among the video's embeddings, ascending.
        layout: The layout of the unpruned prompt.
        embed_text: A function from token ids [M] to embeddings [M, W]. Columns after the first W
            belong to levels of the vision tower (DeepStack), which text does not have; they are
            filled with zeros.

    Returns:
        Rows [L, H], and the indices [L] of the video's unpruned tokens that they are, ascending.
    """
    device, kept, flags = rows.device, len(rows), layout.is_embedding()
    words = [token for token, flag in zip(layout.tokens(), flags, strict=True) if not flag]
    is_text = ~to_device(flags, device)
    frames = to_device(frame_of_tokens(layout), device)
    embeddings = [place for place, flag in enumerate(flags) if flag]
    places = to_device(embeddings, device)[indices]

    # 1. Choose the tokens that stay. The kept rows come first, with the text of their frames and
    #    the text of no frame; the text of other frames fills what is left of the length.
    is_kept = torch.zeros_like(is_text).index_fill(0, places, True)
    keeps_rows = torch.zeros(len(layout.runs) + 1, dtype=torch.bool, device=device)
    keeps_rows = keeps_rows.index_fill(0, frames[places], True)
    keeps_rows[-1:] = True
    comes_first = is_kept | (is_text & keeps_rows[frames])
    later = torch.where(comes_first, 0, torch.where(is_text, 1, 2)) * len(flags)
    order = (later + torch.arange(len(flags), device=device)).argsort()
    stays = order[: item_length(layout, kept)].sort().values

    # 2. Fill each place with the next kept row, or with the text that stands there.
    text = embed_text(to_device(words, device)).to(rows.dtype)
    text = torch.nn.functional.pad(text, (0, rows.shape[1] - text.shape[1]))
    sources = torch.where(is_text, kept + is_text.cumsum(0), is_kept.cumsum(0)) - 1
    return torch.cat([rows, text])[sources[stays]], stays

# SPDX-License-Identifier: Apache-2.0
"""The text among the frames of a video, put among the rows that are kept of it.

Which frames keep their text, `frame_texts.py` says.
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
    """Put the rows that are kept of a video in their places among its text.

    The host reads nothing of it.

    Args:
        rows: [K, H].
        indices: [K], which of the video's embeddings they are, ascending.
        layout: of the unpruned prompt.
        embed_text: token ids [M] to embeddings [M, W]. Columns behind the first W are for the
            levels of a vision tower (DeepStack), of which text has none: they are zero.

    Returns:
        Rows [L, H] and which of the video's unpruned tokens they are, [L], ascending.
    """
    device, kept, flags = rows.device, len(rows), layout.is_embedding()
    words = [token for token, flag in zip(layout.tokens(), flags, strict=True) if not flag]
    is_text = ~to_device(flags, device)
    frames = to_device(frame_of_tokens(layout), device)
    embeddings = [place for place, flag in enumerate(flags) if flag]
    places = to_device(embeddings, device)[indices]

    # 1. First come the kept rows with the text of their frames and of none, then other text.
    is_kept = torch.zeros_like(is_text).index_fill(0, places, True)
    keeps_rows = torch.zeros(len(layout.runs) + 1, dtype=torch.bool, device=device)
    keeps_rows = keeps_rows.index_fill(0, frames[places], True)
    keeps_rows[-1:] = True
    comes_first = is_kept | (is_text & keeps_rows[frames])
    later = torch.where(comes_first, 0, torch.where(is_text, 1, 2)) * len(flags)
    order = (later + torch.arange(len(flags), device=device)).argsort()
    stays = order[: item_length(layout, kept)].sort().values

    # 2. A place holds the next of the kept rows, or its own text.
    text = embed_text(to_device(words, device)).to(rows.dtype)
    text = torch.nn.functional.pad(text, (0, rows.shape[1] - text.shape[1]))
    sources = torch.where(is_text, kept + is_text.cumsum(0), is_kept.cumsum(0)) - 1
    return torch.cat([rows, text])[sources[stays]], stays

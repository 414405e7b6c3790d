# SPDX-License-Identifier: Apache-2.0
"""The text among the frames of a video, such as their timestamps, where the worker embeds it.

A prompt is made before anything is selected, so with text in the prompt each frame would have a
fixed share of the budget. Here the whole video is one item of the prompt instead, as in vLLM's own
video pruning. Its length is known in advance: K rows, and text.

The rule for text: min(T, K) of T frames keep theirs, as no more than these can keep a row. They are
the frames that keep a row, and then the first of the others. With at least as many rows as frames,
that is all text; with fewer, a frame without rows usually loses its timestamp. Where some
timestamps are longer than others, room is left for the longest ones: it goes to the first of the
other frames too, and the last of these may be cut short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.selection.device import to_device


def frame_of_tokens(layout: PromptLayout) -> list[int]:
    """Return the frame that each token of a video belongs to; T, the number of frames: to none.

    Text between two frames belongs to the first as far as it repeats what ends the last frame, and
    to the second as far as it repeats what begins the first frame.
    """
    assert layout.margin is not None
    texts, sizes = layout.texts, layout.runs
    head = texts[0][layout.margin :]
    tail = texts[-1][: len(texts[-1]) - layout.margin]
    begins_alike = all(gap[len(gap) - len(head) :] == head for gap in texts[1:-1])
    frames = [len(sizes)] * layout.margin + [0] * len(head)
    for frame, (size, gap) in enumerate(zip(sizes, texts[1:-1], strict=False)):
        ending = len(gap) - len(head) if begins_alike else len(tail)
        frames += [frame] * (size + ending) + [frame + 1] * (len(gap) - ending)
    last = len(sizes) - 1
    return frames + [last] * (sizes[-1] + len(tail)) + [len(sizes)] * layout.margin


def item_length(layout: PromptLayout, kept: int) -> int:
    """Return the length of the item if so many embeddings are kept: these, and text."""
    owners = zip(frame_of_tokens(layout), layout.is_embedding(), strict=True)
    lengths = Counter(frame for frame, is_embedding in owners if not is_embedding)
    outside = lengths.pop(len(layout.runs), 0)
    return kept + outside + sum(sorted(lengths.values(), reverse=True)[:kept])


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

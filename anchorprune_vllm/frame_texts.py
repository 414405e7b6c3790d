# SPDX-License-Identifier: Apache-2.0
"""Decide which text between the frames of a video stays, where the worker embeds this text.

A prompt is made before anything is selected, so with text (such as timestamps) in the prompt, each
frame would have a fixed share of the budget. Here, the whole video is one item of the prompt
instead, as in vLLM's own video pruning. Its length is known in advance: K rows, and text.

Of T frames, min(T, K) keep their text, because no more than these can keep a row. They are the
frames that keep a row, and then the first of the others. With at least as many rows as frames, all
text stays; with fewer, a frame without rows usually loses its timestamp. If some timestamps are
longer than others, there is room for the longest ones. Room that is left goes to the first of the
other frames, and the text of the last of these may be cut short.
"""

from __future__ import annotations

from collections import Counter

from anchorprune_vllm.prompt_layout import PromptLayout


def frame_of_tokens(layout: PromptLayout) -> list[int]:
    """Return the number of the frame that each token of a video belongs to.

    Tokens that belong to no frame get T, the number of frames. Of the text between two frames, the
    part that repeats the end of the last frame belongs to the first of the two, and the part that
    repeats the beginning of the first frame belongs to the second.
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
    """Return the length of an item that keeps `kept` embeddings, including the text that stays."""
    owners = zip(frame_of_tokens(layout), layout.is_embedding(), strict=True)
    lengths = Counter(frame for frame, is_embedding in owners if not is_embedding)
    outside = lengths.pop(len(layout.runs), 0)
    return kept + outside + sum(sorted(lengths.values(), reverse=True)[:kept])

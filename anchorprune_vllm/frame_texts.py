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

from anchorprune_vllm.prompt_layout import PromptLayout


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

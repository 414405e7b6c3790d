# SPDX-License-Identifier: Apache-2.0
"""Prompts as the tests write them, and as each model wants them.

Tests write `USER: <image>\\nWhy? ASSISTANT: Because. USER: Sure? ASSISTANT:`, which is LLaVA's way.
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

_MEDIA = {
    "<IMG_CONTEXT>": ("<IMG_CONTEXT>", "<video>"),
    "<|begin_of_image|>": (
        "<|begin_of_image|><|image|><|end_of_image|>",
        "<|begin_of_video|><|video|><|end_of_video|>",
    ),
    "<|image|>": ("<|image|>", "<|video|>"),
    "<|image_pad|>": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "<start_of_image>": ("<start_of_image>", ""),
    "[IMG]": ("[IMG]", ""),
}
"""What stands for an image and for a video, in a vocabulary that has such a token."""
_ELSE = ("<image>", "<video>")


def prompt_of(question: str, images: int = 1, videos: int = 0) -> str:
    """A prompt of one turn, media first."""
    return f"USER: {'<image>' * images}{'<video>' * videos}\n{question} ASSISTANT:"


def in_dialect(prompt: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A prompt of the tests in the words of the tokenizer's model."""
    tokens = tokenizer.get_vocab()
    if "<|im_start|>" not in tokens or not prompt.startswith("USER:"):
        return prompt
    known = (media for token, media in _MEDIA.items() if token in tokens)
    media = _ELSE if "<image>" in tokens else next(known, _ELSE)
    return _to_chatml(prompt, media)


def _to_chatml(prompt: str, media: tuple[str, str]) -> str:
    written = ""
    _, *parts = re.split(r"(USER|ASSISTANT):", prompt)
    for role, words in zip(parts[::2], parts[1::2], strict=True):
        content = words.strip()
        for asked, written_so in zip(_ELSE, media, strict=True):
            content = content.replace(asked, written_so)
        written += f"<|im_start|>{role.lower()}\n{content}"
        if content or role == "USER":
            written += "<|im_end|>\n"
    return written

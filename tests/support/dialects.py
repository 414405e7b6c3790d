# SPDX-License-Identifier: Apache-2.0
"""Prompts as the tests write them, and as each model wants them.

Tests write `USER: <image>\\nWhy? ASSISTANT: Because. USER: Sure? ASSISTANT:`, which is LLaVA's way.
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase


def prompt_of(question: str, images: int = 1, videos: int = 0) -> str:
    """A prompt of one turn, media first."""
    return f"USER: {'<image>' * images}{'<video>' * videos}\n{question} ASSISTANT:"


def in_dialect(prompt: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A prompt of the tests in the words of the tokenizer's model."""
    is_chatml = "<|im_start|>" in tokenizer.get_vocab()
    return _to_chatml(prompt) if is_chatml and prompt.startswith("USER:") else prompt


def _to_chatml(prompt: str) -> str:
    written = ""
    _, *parts = re.split(r"(USER|ASSISTANT):", prompt)
    for role, words in zip(parts[::2], parts[1::2], strict=True):
        content = words.strip()
        for name in ("image", "video"):
            media = f"<|vision_start|><|{name}_pad|><|vision_end|>"
            content = content.replace(f"<{name}>", media)
        written += f"<|im_start|>{role.lower()}\n{content}"
        if content or role == "USER":
            written += "<|im_end|>\n"
    return written

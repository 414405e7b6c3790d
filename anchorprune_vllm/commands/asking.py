# SPDX-License-Identifier: Apache-2.0
"""One question to a server of ours, as an OpenAI client asks it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from anchorprune_vllm.testing.media import Media


@dataclass(frozen=True)
class Answer:
    """What a client sees of one streamed answer."""

    prompt_tokens: int
    seconds_to_first_token: float
    text: str


def connect(url: str) -> OpenAI:
    """A client of a server on this machine."""
    return OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        http_client=DefaultHttpxClient(trust_env=False),  # no proxy between us and this machine
    )


def ask(
    client: OpenAI,
    media: Media,
    text: str,
    *,
    model: str,
    budget: str | None = None,
    max_tokens: int = 12,
) -> Answer:
    """One streamed question; `budget` overrides the server's."""
    override: dict[str, Any] = {} if budget is None else {"anchorprune": {"budget": budget}}
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[
            {
                "role": "user",
                "content": [media.as_message_part(), {"type": "text", "text": text}],
            }
        ],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"mm_processor_kwargs": override} if override else None,
    )
    first, answer, prompt_tokens = None, "", 0
    for chunk in stream:
        if chunk.usage is not None:
            prompt_tokens = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            if choice.delta.content and first is None:
                first = time.perf_counter()
            answer += choice.delta.content or ""
    return Answer(prompt_tokens, (first or time.perf_counter()) - start, answer)

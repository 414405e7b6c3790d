# SPDX-License-Identifier: Apache-2.0
"""Asks a server on this machine a question, as an OpenAI client does."""

from __future__ import annotations

import time
from dataclasses import dataclass

from openai import DefaultHttpxClient, OpenAI

from anchorprune_vllm.testing.media import Media


@dataclass(frozen=True)
class Answer:
    """What a client sees of a streamed answer."""

    prompt_tokens: int
    seconds_to_first_token: float
    text: str


def connect(url: str) -> OpenAI:
    """Return a client of a server on this machine, which no proxy stands in front of."""
    client = DefaultHttpxClient(trust_env=False)
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=client)


def ask(
    client: OpenAI,
    media: Media,
    text: str,
    *,
    model: str,
    budget: str | None = None,
    max_tokens: int = 12,
) -> Answer:
    """Ask a question about an image or video; `budget` overrides the server's."""
    override = {"mm_processor_kwargs": {"anchorprune": {"budget": budget}}}
    content = [media.as_message_part(), {"type": "text", "text": text}]
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=override if budget is not None else None,
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

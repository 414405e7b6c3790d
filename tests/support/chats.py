# SPDX-License-Identifier: Apache-2.0
"""Chats with a server, as an OpenAI client has them."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from anchorprune_vllm.testing.media import as_data_url
from anchorprune_vllm.testing.server import VllmServer
from tests.support.engine import GREEDY
from tests.support.pictures import picture


def client_of(server: VllmServer) -> OpenAI:
    """Every request has a connection of its own, and so may have another API server."""
    return OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=600,
        default_headers={"Connection": "close"},
    )


def user(question: str, *seeds: int) -> dict[str, Any]:
    images = [
        {"type": "image_url", "image_url": {"url": as_data_url(picture(seed))}} for seed in seeds
    ]
    return {"role": "user", "content": [*images, {"type": "text", "text": question}]}


def chat(client: OpenAI, *messages: dict[str, Any], override: Any = None, **options: Any) -> Any:
    if override is not None:
        options["extra_body"] = {"mm_processor_kwargs": {"anchorprune": override}}
    return client.chat.completions.create(
        model="demo",
        messages=list(messages),
        **{"temperature": 0, "max_tokens": GREEDY.max_tokens, **options},
    )

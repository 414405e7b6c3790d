# SPDX-License-Identifier: Apache-2.0
"""Engines and references of the general adapter's families, asked the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state

from tests.support.dialects import prompt_of
from tests.support.engine import generate, request
from tests.support.pictures import picture
from tests.support.reference import Reference
from tests.support.reference.base import is_image

FAMILIES = (
    "qwen3-vl",
    "qwen3-vl-moe",
    "qwen2-vl",
    "glm-4v",
    "glm-4v-moe",
    "gemma3",
    "gemma4",
    "mistral3",
    "pixtral",
    "idefics3",
    "smolvlm",
    "llama4",
    "internvl",
    "internvl-chat",
)
"""Families with a reference (test_families_reference.py)."""
LINEAR_ATTENTION = ("qwen3.5", "qwen3.5-moe")
"""Those of them that no engine serves in float32 on a CPU (test_linear_attention.py)."""
_SHAPES = [(300, 200), (700, 500)]


@contextmanager
def groups_with_experts() -> Iterator[None]:
    """Let models with experts follow others in this process, which have left no group for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "_EP", parallel_state._EP or parallel_state._TP)
        yield


def pictures(seed: int, count: int) -> list[Image.Image]:
    """Images of unlike shapes."""
    return [picture(seed + number, _SHAPES[number]) for number in range(count)]


def prompt_for(question: str, media: list[Any]) -> str:
    """A prompt of one turn: images, videos, then the question."""
    images = sum(map(is_image, media))
    # Without the line's end: behind it vLLM does not find an image of Gemma's.
    return prompt_of(question, images, len(media) - images).replace("\n", "")


def ask(
    llm: LLM, reference: Reference, prompt: str, media: list[Any], budget: int | str, tokens: int
) -> Any:
    """What vLLM gives back for one prompt, with the best of logprobs."""
    asked = request("", *media, override={"budget": budget})
    del asked["prompt"]
    asked |= reference.given_prompt(prompt, media)
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1)
    (output,) = generate(llm, asked, params=params)
    return output


def logprobs_of(output: Any) -> list[float]:
    """The best logarithm of a probability at each place of an answer."""
    return [max(token.logprob for token in each.values()) for each in output.outputs[0].logprobs]

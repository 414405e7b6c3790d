# SPDX-License-Identifier: Apache-2.0
"""Chats about pictures for any model, and answers that can be compared."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any, NamedTuple

import pytest
from PIL import Image
from vllm import LLM, SamplingParams

from tests.support.pictures import picture

ANSWER = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
SMALL, LARGE = picture(1, (300, 200)), picture(2, (700, 500))
TOLERANCE = 1e-3


def as_url(image: Image.Image) -> str:
    """Return a picture as clients send it, which Mistral's tokenizers want too."""
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def message(*parts: str | Image.Image) -> list[dict[str, Any]]:
    """A user's turn of text and pictures."""
    content: list[dict[str, Any]] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": as_url(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


ASKED = {
    "one": message(SMALL, "What color is the circle?"),
    "two": message(SMALL, LARGE, "Where is the red square?"),
    "words between": message(SMALL, "What?", LARGE),
    "same image, other words": message(SMALL, "How many are there?"),
    "none": message("What is this?"),
}


class Answer(NamedTuple):
    """A greedy answer, and how long its prompt was."""

    prompt: int
    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, output: Any) -> Answer:
        """Take it from what vLLM returns."""
        (answer,) = output.outputs
        best = [max(token.logprob for token in each.values()) for each in answer.logprobs]
        return cls(len(output.prompt_token_ids), list(answer.token_ids), best)

    def equals(self, other: Answer) -> bool:
        """Whether prompts are as long, tokens are the same, and logprobs within `TOLERANCE`."""
        return self[:2] == other[:2] and self.logprobs == pytest.approx(
            other.logprobs, abs=TOLERANCE
        )


def override(budget: int | str | None) -> dict[str, Any]:
    """The budget of a request's own, as an argument of `LLM.chat`."""
    return {} if budget is None else {"mm_processor_kwargs": {"anchorprune": {"budget": budget}}}


def ask(llm: LLM, asked: str, budget: int | str | None = None) -> Answer:
    """Answer one of `ASKED`."""
    (output,) = llm.chat([ASKED[asked]], ANSWER, use_tqdm=False, **override(budget))
    return Answer.of(output)

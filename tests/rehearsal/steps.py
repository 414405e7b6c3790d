# SPDX-License-Identifier: Apache-2.0
"""What every engine is asked, step after step; later steps find the caches of earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from tests.rehearsal.report import Answer
from tests.support.asking import message, override
from tests.support.engine import generate, request
from tests.support.pictures import QUESTIONS, clip, picture
from tests.support.plain_vllm import takes_videos

Step = Callable[[LLM, Path], list[Answer]]

# Small: Triton's interpreter needs seconds for the attention of an image of 336 x 336. None of
# them is one tile of a LLaVA: its base view and its crop would be copies, whose scores differ by
# rounding alone, which is not the same on every processor.
SIZES = ((140, 200), (252, 252), (336, 112), (90, 200))
SMALL = (168, 168)
LARGE = SIZES[1]
WHOLE = {"budget": "100%"}


def ask(llm: LLM, *requests: dict[str, Any], tokens: int = 5) -> list[Answer]:
    """Answers to requests that are given together."""
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0)
    return [Answer.of(output) for output in generate(llm, *requests, params=params)]


def pruned(llm: LLM, model: Path) -> list[Answer]:
    """Images of all sizes; the last question is about two."""
    requests = [request(QUESTIONS[i], picture(i, size)) for i, size in enumerate(SIZES)]
    return ask(llm, *requests, request(QUESTIONS[4], picture(4, SIZES[0]), picture(5, SIZES[2])))


def cached(llm: LLM, model: Path) -> list[Answer]:
    """Another question about a known image, then the same one, which all caches know."""
    new = request(QUESTIONS[5], picture(0, SIZES[0]))
    return ask(llm, new) + ask(llm, new)


def whole(llm: LLM, model: Path) -> list[Answer]:
    """A budget of all tokens: vLLM's own path, in chunks that cut the image."""
    return ask(llm, request(QUESTIONS[0], picture(6, SIZES[1]), override=WHOLE))


def embeddings(llm: LLM, model: Path) -> list[Answer]:
    """The client's own."""
    return ask(llm, with_embeddings(llm, 30))


def with_embeddings(llm: LLM, rows: int) -> dict[str, Any]:
    """A request with embeddings in place of an image."""
    size = llm.model_config.get_hidden_size()
    noise = torch.randn(1, rows, size, generator=torch.Generator().manual_seed(rows)) / 8
    given: Any = noise
    if llm.model_config.hf_config.model_type == "qwen2_5_vl":
        given = {"image_embeds": noise[0], "image_grid_thw": torch.tensor([[1, 2, 2 * rows]])}
    return {**request(QUESTIONS[1], picture(0, SIZES[0])), "multi_modal_data": {"image": given}}


def mixed(llm: LLM, model: Path) -> list[Answer]:
    """All at once: words alone, known and new images, several budgets and questions."""
    return ask(
        llm,
        request(QUESTIONS[0]),
        request(QUESTIONS[1], picture(0, SIZES[0])),
        request(QUESTIONS[2], picture(7, SIZES[0]), override={"budget": 7}),
        request(QUESTIONS[3], picture(8, SIZES[0]), override=WHOLE),
        request("", picture(9, SIZES[0])),
        request(QUESTIONS[4], picture(10, SIZES[0]), override={"query": "none"}),
        request(QUESTIONS[5], picture(11, SIZES[0]), picture(7, SIZES[0]), picture(12, SIZES[3])),
        with_embeddings(llm, 24),
        request(QUESTIONS[6], picture(13, SIZES[0]), override={"budget": 100}),
    )


def videos(llm: LLM, model: Path) -> list[Answer]:
    """Videos alone, whole, known, and beside an image."""
    if not takes_videos(model):
        return []
    first, second = clip(20, frames=6, size=SIZES[0]), clip(21, frames=4, size=(140, 200))
    return [
        *ask(llm, request(QUESTIONS[0], first), request(QUESTIONS[1], second)),
        *ask(llm, request(QUESTIONS[2], first), request(QUESTIONS[3], second, override=WHOLE)),
        *ask(llm, request(QUESTIONS[4], picture(14, SIZES[0]), clip(22, frames=5, size=SIZES[0]))),
    ]


def reloaded(llm: LLM, model: Path) -> list[Answer]:
    """A new question about a known image, after the weights were loaded again."""
    llm.collective_rpc("reload_weights")
    return ask(llm, request(QUESTIONS[6], picture(0, SIZES[0])))


def preempted(llm: LLM, model: Path) -> list[Answer]:
    """More than fit into a small KV cache: some lose their tokens, and start again."""
    requests = [
        request(QUESTIONS[i % 8], picture(30 + i, LARGE), override={"budget": 30}) for i in range(9)
    ]
    return ask(llm, *requests, tokens=24)


def cut(llm: LLM, model: Path) -> list[Answer]:
    """Images that begin at, before and after the end of a chunk."""
    requests = []
    for words in (0, 13, 21, 34, 40):
        item = request(
            "", picture(60 + words, LARGE), override={"budget": 40, "query": QUESTIONS[1]}
        )
        item["prompt"] = f"USER: {'house ' * words}<image>What? ASSISTANT:"
        requests.append(item)
    return ask(llm, *requests)


def chats(llm: LLM, model: Path) -> list[Answer]:
    """Chats about images, for models whose prompts only their own templates know."""
    small, wide = picture(80, SMALL), picture(81, SIZES[2])
    asked = [
        (None, small, QUESTIONS[0]),
        (5, small, QUESTIONS[1]),  # another question about a known image
        (None, small, QUESTIONS[2], wide),
        (None, small, QUESTIONS[0]),  # all caches know it
        ("25%", wide, QUESTIONS[3]),
        ("100%", small, wide, QUESTIONS[4]),
        (None, QUESTIONS[5]),
    ]
    return [chat(llm, budget, *parts) for budget, *parts in asked]


def chat(llm: LLM, budget: Any, *parts: Any) -> Answer:
    """Answer a turn of text and images."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True)
    (output,) = llm.chat([message(*parts)], params, use_tqdm=False, **override(budget))
    return Answer.of(output)


def stamped(llm: LLM, model: Path) -> list[Answer]:
    """Videos whose frames have their times, or numbers, beside them in the prompt.

    With fewer tokens than frames only some of these texts stay.
    """
    first, second = clip(90, frames=8, size=SMALL), clip(91, frames=4, size=SIZES[3])
    requests = [
        request(QUESTIONS[0], first),
        request(QUESTIONS[1], first, override={"budget": 3}),  # a known video
        request(QUESTIONS[2], picture(82, SMALL), second, override={"budget": "25%"}),
        request(QUESTIONS[3], second, override=WHOLE),
    ]
    return ask(llm, *requests)


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (
        *(pruned, cached, whole, embeddings, mixed, videos, reloaded, preempted, cut),
        *(chats, stamped),
    )
}

# SPDX-License-Identifier: Apache-2.0
"""Native positions: what the language model receives is what the unpruned prompt would have.

The engine computes 48 tokens at a time, in blocks of 32, with a KV cache for few requests.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.support.engine import answer, forget_everything, generate, media_of, request, seen
from tests.support.models import with_videos
from tests.support.pictures import QUESTIONS, clip, picture
from tests.support.reference import Reference
from tests.support.runners import both_runners, runners_in_turn
from tests.support.seen_positions import seen_positions


def check(
    native: LLM,
    reference: Reference,
    prompts: list[dict[str, Any]],
    words: str,
    budget: int,
    length: int = 12,
) -> list[int]:
    """Positions of requests given together, all pruned for the same words, and some answers.

    `length`: tokens of answer. Returns how often each request was started.
    """
    all_starts = []
    override = {"mm_processor_kwargs": {"anchorprune": {"budget": budget, "query": words}}}
    seen_positions(native)
    params = SamplingParams(temperature=0, max_tokens=length)
    outputs = generate(native, *({**item, **override} for item in prompts), params=params)
    recorded = seen_positions(native)
    for item, output in zip(prompts, outputs, strict=True):
        media = media_of(item)
        kept = [reference.kept(one, words, budget) for one in media]
        expected = reference.native_positions(item["prompt"], media, kept, length).T.tolist()
        (starts,) = (
            starts for name, starts in recorded.items() if name.startswith(output.request_id)
        )
        for start in starts:
            for token, position in start.items():
                # transformers has one channel for a LLaVA, vLLM three that are equal.
                repeat = len(position) // len(expected[token])
                assert list(position) == expected[token] * repeat, token
        prompt_length = len(output.prompt_token_ids)
        # All that was not cached has been computed, up to the token before the last.
        assert max(starts[-1]) == prompt_length + length - 2
        assert min(starts[0]) == output.num_cached_tokens
        all_starts.append(len(starts))
        if len(all_starts) <= 4:  # the reference is slow
            given = list(output.outputs[0].token_ids)
            assert given == reference.answer(item["prompt"], media, kept, length, native=True)
    return all_starts


def words_of(count: int) -> str:
    return " ".join(["house"] * count)


@runners_in_turn("before", range(0, 48, 5))
def test_chunk_boundaries_everywhere(native: LLM, reference: Reference, before: int) -> None:
    """40 kept tokens: chunks begin and end before, at, and in the item."""
    item = request("", picture(700 + before))
    item["prompt"] = f"USER: {words_of(before)}<image>{words_of(before % 7)} ASSISTANT:"
    check(native, reference, [item], "Where is the dog?", budget=40)


@pytest.mark.parametrize(
    "prompt",
    [
        "USER: <image>\nWhat is this? ASSISTANT:",
        "USER: First <image> and <image> and then? ASSISTANT:",
        "USER: <image><image><image>Which? ASSISTANT:",
        "USER: What is <image> ASSISTANT: A dog. USER: And <image> this? ASSISTANT:",
        "USER: What is this? <image>",
        "USER: Only words, no picture. ASSISTANT:",
    ],
)
@both_runners
def test_prompts(native: LLM, reference: Reference, prompt: str) -> None:
    shapes = [(336, 336), (500, 150), (150, 400)]
    images = [picture(720 + i, shapes[i]) for i in range(prompt.count("<image>"))]
    item = {**request("", *images), "prompt": prompt}
    check(native, reference, [item], "What is on the left?", budget=13)


@runners_in_turn("size", [(1700, 9), (9, 1700), (900, 700), (333, 157)])
def test_shapes(native: LLM, reference: Reference, size: tuple[int, int]) -> None:
    item = request("What?", picture(725, size))
    check(native, reference, [item], "What is on the left?", budget=22)


@both_runners
def test_prefix_that_covers_the_media(native: LLM, reference: Reference) -> None:
    image = picture(730)
    start = f"USER: <image>{words_of(30)}"
    for end in (" a dog", " a cat", " a house"):
        item = {**request("", image), "prompt": f"{start}{end} ASSISTANT:"}
        check(native, reference, [item], "What?", budget=20)
    (again,) = generate(native, item_with(item, "What?", 20))
    assert again.num_cached_tokens >= 32


def item_with(item: dict[str, Any], words: str, budget: int) -> dict[str, Any]:
    return {**item, "mm_processor_kwargs": {"anchorprune": {"budget": budget, "query": words}}}


@both_runners
def test_prefix_that_ends_in_the_media(native: LLM, reference: Reference) -> None:
    image = picture(731)
    for end in ("Why?", "Where is the dog?"):
        item = {**request("", image), "prompt": f"USER: <image>{end} ASSISTANT:"}
        check(native, reference, [item], "What?", budget=70)
    (again,) = generate(native, item_with(item, "What?", 70))
    assert 32 <= again.num_cached_tokens < 70


@both_runners
def test_requests_of_which_some_start_again(native: LLM, reference: Reference) -> None:
    """They do not fit into the KV cache together: some lose theirs, and are resumed."""
    forget_everything(native)
    prompts = [request(QUESTIONS[i % 8], picture(740 + i)) for i in range(12)]
    starts = check(native, reference, prompts, "Who is there?", budget=40, length=32)
    assert max(starts) > 1, "a request must have started again for this to show"


@with_videos
@both_runners
def test_images_and_videos(native: LLM, reference: Reference) -> None:
    prompts = [
        request("What?", clip(770, frames=9)),
        request("What?", picture(771, (400, 300)), clip(772, size=(500, 200))),
        request("What?", clip(773), clip(774, frames=3)),
    ]
    for budget in (5, 37):
        check(native, reference, prompts, "Where is the dog?", budget)


@pytest.mark.parametrize("any_model", ["llava-1.5", "qwen2.5-vl"], indirect=True)
@both_runners
def test_all_tokens_through_the_pruning_path(
    native: LLM,
    pruned: LLM,
    runner: str,
    mixed: list[dict[str, Any]],
    plain_answers: list[list[int]],
) -> None:
    """Answers equal unpruned vLLM's: order and positions are right."""
    # Few enough images for the smaller engine.
    short = [
        i
        for i, item in enumerate(mixed)
        if len(item.get("multi_modal_data", {}).get("image", [])) < 3
    ]
    everything = {"mm_processor_kwargs": {"anchorprune": {"budget": "100%"}}}
    for llm in (native, pruned) if runner == "V1" else (native,):
        forget_everything(llm)
        seen(llm)
        llm.collective_rpc(prune_even_if_all_stay)
        given = [answer(llm, {**mixed[i], **everything})[0] for i in short]
        llm.collective_rpc(prune_if_some_go)
        kept = seen(llm).kept
        assert kept
        assert all(indices == list(range(len(indices))) for indices in kept)
        assert given == [plain_answers[i] for i in short]


def prune_even_if_all_stay(worker: Any) -> None:
    from anchorprune_vllm.plan import MediaTokens

    worker.are_all_kept = MediaTokens.are_all_kept
    MediaTokens.are_all_kept = lambda self, kept: False


def prune_if_some_go(worker: Any) -> None:
    from anchorprune_vllm.plan import MediaTokens

    MediaTokens.are_all_kept = worker.are_all_kept

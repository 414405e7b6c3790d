# SPDX-License-Identifier: Apache-2.0
"""Every cache serves the tokens of the question that was asked, and the tower runs once."""

from __future__ import annotations

from typing import Any

from PIL import Image
from vllm import LLM, SamplingParams

from tests.support.dialects import prompt_of
from tests.support.engine import GREEDY, answer, request, seen
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference
from tests.support.runners import both_runners, runners_in_turn


def expected(reference: Reference, image: Image.Image, question: str, k: int) -> list[int]:
    kept = reference.kept(image, question, k)
    return reference.answer(prompt_of(question), [image], [kept], GREEDY.max_tokens)


@both_runners
def test_new_question_about_a_known_image(pruned: LLM, reference: Reference) -> None:
    image = picture(200)
    seen(pruned)
    for question in QUESTIONS:
        assert answer(pruned, request(question, image))[0] == expected(
            reference, image, question, 16
        )
    after = seen(pruned)
    assert after.tower_batches == [reference.tower_size(image)]
    # Two questions may have the same best tokens; most have others.
    assert len({tuple(kept) for kept in after.kept}) > len(QUESTIONS) // 2


@both_runners
def test_new_weights_forget_known_images(pruned: LLM, reference: Reference) -> None:
    image = picture(211)
    answer(pruned, request(QUESTIONS[0], image))
    pruned.collective_rpc(load_no_weights)
    seen(pruned)
    answer(pruned, request(QUESTIONS[1], image))
    assert seen(pruned).tower_batches == [reference.tower_size(image)]


def load_no_weights(worker: Any) -> None:
    worker.model_runner.model.load_weights([])


@both_runners
def test_same_question_again(pruned: LLM) -> None:
    asked = request(QUESTIONS[0], picture(201))
    first = answer(pruned, asked)
    seen(pruned)
    assert answer(pruned, asked) == first
    after = seen(pruned)
    assert after.embed_calls == []
    assert after.tower_batches == []


@both_runners
def test_questions_asked_together_share_the_tower(pruned: LLM, reference: Reference) -> None:
    image = picture(202)
    seen(pruned)
    answers = answer(pruned, *(request(question, image) for question in QUESTIONS))
    assert answers == [expected(reference, image, question, 16) for question in QUESTIONS]
    assert seen(pruned).tower_batches == [reference.tower_size(image)]


@both_runners
def test_two_budgets_at_once(pruned: LLM, reference: Reference) -> None:
    image, budgets = picture(203), [4, 8, 16, 40]
    asked = [request(QUESTIONS[1], image, override={"budget": budget}) for budget in budgets]
    answers = answer(pruned, *asked)
    assert answers == [expected(reference, image, QUESTIONS[1], budget) for budget in budgets]


@both_runners
def test_media_uuids(pruned: LLM, reference: Reference) -> None:
    image = picture(204)
    named: dict[str, Any] = {"multi_modal_uuids": {"image": ["picture-204"]}}
    seen(pruned)
    for question in QUESTIONS[:3]:
        given = answer(pruned, request(question, image, **named))[0]
        assert given == expected(reference, image, question, 16)
    assert seen(pruned).tower_batches == [reference.tower_size(image)]


@both_runners
def test_a_uuid_that_names_another_picture_later(pruned: LLM, reference: Reference) -> None:
    images = [picture(212, size) for size in ((600, 500), (336, 336))]
    if reference.unit_sizes(images[0]) == reference.unit_sizes(images[1]):
        images[1] = images[0]  # as far as can be told: the uuid says that it is the same
    named: dict[str, Any] = {"multi_modal_uuids": {"image": ["picture-212"]}}
    for size, question, image in zip(((600, 500), (336, 336)), QUESTIONS, images, strict=False):
        given = answer(pruned, request(question, picture(212, size), **named))[0]
        assert given == expected(reference, image, question, 16)


@both_runners
def test_known_uuid_needs_no_image(pruned: LLM) -> None:
    image = picture(205)
    named: dict[str, Any] = {"multi_modal_uuids": {"image": ["picture-205"]}}
    first = answer(pruned, request(QUESTIONS[0], image, **named))
    again = {**request(QUESTIONS[0], image, **named), "multi_modal_data": {"image": [None]}}
    assert answer(pruned, again) == first


@runners_in_turn(
    "scope_and_words",
    [
        ("turn", "Where is the dog?"),
        ("last", "Who is holding the ball?"),
        ("all", "Where is the dog?\nWho is holding the ball?"),
        ("none", ""),
        ("a green square", "a green square"),
    ],
)
def test_query_scopes(pruned: LLM, reference: Reference, scope_and_words: tuple[str, str]) -> None:
    scope, words = scope_and_words
    image = picture(206)
    prompt = "USER: <image>\nWhere is the dog? ASSISTANT: Here. USER: Who is holding the ball? "
    asked = {
        **request("", image, override={"query": scope}),
        "prompt": f"{prompt}ASSISTANT:",
    }
    seen(pruned)
    answer(pruned, asked)
    assert seen(pruned).kept == [reference.kept(image, words, 16)]


@both_runners
def test_two_images_of_a_conversation_have_their_own_questions(
    pruned: LLM, reference: Reference
) -> None:
    images = [picture(207), picture(208)]
    prompt = f"{prompt_of(QUESTIONS[0])} A house. {prompt_of(QUESTIONS[1])}"
    seen(pruned)
    given = answer(pruned, {"prompt": prompt, "multi_modal_data": {"image": images}})[0]
    kept = seen(pruned).kept
    assert kept == [
        reference.kept(image, question, 16)
        for image, question in zip(images, QUESTIONS[:2], strict=True)
    ]
    assert given == reference.answer(prompt, images, kept, GREEDY.max_tokens)


def converse(llm: LLM, image: Image.Image, scope: str) -> list[int]:
    """Three turns about one image; how many prompt tokens each found in the prefix cache."""
    a_block = SamplingParams(temperature=0, max_tokens=32)  # each turn fills one to find later
    messages: list[dict[str, Any]] = []
    cached = []
    for question in QUESTIONS[:3]:
        content: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if not messages:
            content.insert(0, {"type": "image_pil", "image_pil": image})
        messages.append({"role": "user", "content": content})
        output = llm.chat(
            messages,
            a_block,
            use_tqdm=False,
            mm_processor_kwargs={"anchorprune": {"query": scope, "budget": 64}},
        )[0]
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        cached.append(output.num_cached_tokens)
    return cached


@both_runners
def test_later_turns_hit_the_prefix(pruned: LLM) -> None:
    seen(pruned)
    _, second, third = converse(pruned, picture(209), "turn")
    assert second >= 64
    assert third > second
    assert len(seen(pruned).kept) == 1


@both_runners
def test_scope_last_follows_the_conversation(pruned: LLM, reference: Reference) -> None:
    image = picture(210)
    seen(pruned)
    _, second, third = converse(pruned, image, "last")
    after = seen(pruned)
    assert second == third == 0
    assert len({tuple(kept) for kept in after.kept}) == 3
    assert after.tower_batches == [reference.tower_size(image)]

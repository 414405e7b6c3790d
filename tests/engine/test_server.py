# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --anchorprune-budget`, through an unchanged OpenAI client."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from anchorprune_vllm.testing.media import draw_clip
from anchorprune_vllm.testing.server import VllmServer
from tests.support.chats import chat, user
from tests.support.engine import GREEDY
from tests.support.models import with_videos
from tests.support.pictures import QUESTIONS, picture, read_clip
from tests.support.reference import Reference


@pytest.fixture(scope="session")
def client(server: VllmServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def text_tokens(reference: Reference, question: str) -> int:
    ids = reference.prompt_ids(reference.chat_prompt(question), start=False)
    return len(ids) - 1  # without the placeholder


@pytest.mark.parametrize(
    ("override", "kept"),
    [(None, 16), ({"budget": 5}, 5), ({"budget": "50%"}, "half"), ({"budget": "100%"}, "all")],
)
def test_prompt_tokens(
    client: OpenAI, reference: Reference, override: Any, kept: int | str
) -> None:
    image = picture(600)
    counts = {"half": (sum(reference.unit_sizes(image)) + 1) // 2, "all": reference.unpruned(image)}
    kept = counts.get(kept, kept)
    usage = chat(client, user(QUESTIONS[0], 600), override=override).usage
    assert usage.prompt_tokens == text_tokens(reference, QUESTIONS[0]) + kept


def test_usage_tells_how_many_visual_tokens_were_kept(client: OpenAI, reference: Reference) -> None:
    """vLLM's own account of them, with --enable-prompt-tokens-details."""
    for override, kept in ((None, 16), ({"budget": "100%"}, reference.unpruned(picture(600)))):
        usage = chat(client, user(QUESTIONS[0], 600, 600), override=override).usage
        assert usage.prompt_tokens_details.multimodal_tokens == {"image": 2 * kept}


def test_answer(client: OpenAI, reference: Reference) -> None:
    image, question = picture(601), QUESTIONS[1]
    given = chat(client, user(question, 601), logprobs=True).choices[0]
    kept = reference.kept(image, question, 16)
    # The models' chat templates have no start token.
    prompt = reference.chat_prompt(question)
    expected = reference.answer(prompt, [image], [kept], GREEDY.max_tokens, start=False)
    assert [t.token for t in given.logprobs.content] == [
        reference.tokenizer.decode([token]) for token in expected
    ]


@with_videos
def test_video_url(client: OpenAI, reference: Reference, tmp_path: Path) -> None:
    """A clip in an MP4 file, as a data URL: vLLM's own loader takes all of its 16 frames."""
    media = draw_clip(seed=1)
    part = media.as_message_part()
    question = {"type": "text", "text": QUESTIONS[1]}
    reply = chat(client, {"role": "user", "content": [part, question]}, logprobs=True)
    path = tmp_path / "clip.mp4"
    path.write_bytes(base64.b64decode(media.url.partition(",")[2]))
    video = read_clip(path)
    assert len(video[0]) == 16
    kept = reference.kept(video, QUESTIONS[1], 16)
    prompt = reference.chat_prompt(QUESTIONS[1]).replace("image", "video")
    expected = reference.answer(prompt, [video], [kept], GREEDY.max_tokens, start=False)
    assert [t.token for t in reply.choices[0].logprobs.content] == [
        reference.tokenizer.decode([token]) for token in expected
    ]
    text = len(reference.prompt_ids(prompt, start=False)) - 1
    assert reply.usage.prompt_tokens == text + 16


def test_several_images(client: OpenAI, reference: Reference) -> None:
    question, seeds = QUESTIONS[2], (607, 608, 609)
    given = chat(client, user(question, *seeds), logprobs=True).choices[0]
    images = [picture(seed) for seed in seeds]
    kept = [reference.kept(image, question, 16) for image in images]
    prompt = reference.chat_prompt(question, images=3)
    expected = reference.answer(prompt, images, kept, GREEDY.max_tokens, start=False)
    assert [t.token for t in given.logprobs.content] == [
        reference.tokenizer.decode([token]) for token in expected
    ]


def test_streaming_gives_the_same_words(client: OpenAI) -> None:
    message = user(QUESTIONS[2], 602)
    whole = chat(client, message).choices[0].message.content
    chunks = chat(client, message, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_several_answers(client: OpenAI) -> None:
    message = user(QUESTIONS[3], 603)
    several = chat(client, message, n=3, temperature=1, seed=5).choices
    alone = [chat(client, message, temperature=1, seed=seed).choices[0] for seed in (5, 6, 7)]
    assert [c.message.content for c in several] == [c.message.content for c in alone]


def test_completions_without_image(client: OpenAI) -> None:
    completion = client.completions.create(
        model="demo", prompt=QUESTIONS[0], max_tokens=4, temperature=0
    )
    assert completion.usage.completion_tokens == 4


def test_conversation_hits_the_prefix(client: OpenAI) -> None:
    messages = [user(QUESTIONS[4], 604)]
    first = chat(client, *messages, override={"budget": 64})
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append(user(QUESTIONS[5]))
    second = chat(client, *messages, override={"budget": 64})
    assert second.usage.prompt_tokens_details.cached_tokens >= 64


def test_64_clients_at_once(client: OpenAI) -> None:
    asked = [(user(QUESTIONS[i % 8], 610 + i % 10), {"budget": 4 + i % 30}) for i in range(64)]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda a: chat(client, a[0], override=a[1]), asked))
    alone = [chat(client, message, override=override) for message, override in asked]
    contents = [[reply.choices[0].message.content for reply in run] for run in (together, alone)]
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"budget": 0}, "Budget 0 is not allowed"),
        ({"budget": -1}, "Budget -1 is not allowed"),
        ({"budget": 1.5}, "Budget 1.5 is not allowed"),
        ({"budget": "abc"}, "Budget 'abc' is not allowed"),
        ({"budget": "200%"}, "Budget '200%' is not allowed"),
        ({"budget": None}, "Budget None is not allowed"),
        ({"budgte": 8}, "unknown setting 'budgte' (did you mean 'budget'?)"),
        ({"tau": 0.5}, "unknown setting 'tau'; allowed: budget, query"),
        ({"query": 7}, "query must be one of turn, last, all, none, or the words"),
        (8, "must be a dictionary such as"),
    ],
)
def test_bad_override_is_refused_and_the_server_lives(
    client: OpenAI, override: Any, words: str
) -> None:
    with pytest.raises(BadRequestError) as error:
        chat(client, user(QUESTIONS[0], 605), override=override)
    assert words in error.value.message
    assert chat(client, user(QUESTIONS[0], 605)).choices[0].message.content


def test_empty_question(client: OpenAI) -> None:
    assert chat(client, user("", 606)).choices[0].message.content


def test_one_line_says_what_is_active(server: VllmServer) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "AnchorPrune is" in line]
    processes = {line.split("pid=")[1].split(")")[0] for line in lines}
    assert len(lines) == len(processes) >= 2
    assert all("method anchorprune keeps 16 visual tokens" in line for line in lines)
    encoders = ("/model/clip", "/model/siglip", "text encoder the model's own word embeddings")
    assert all(line.endswith(encoders) for line in lines)

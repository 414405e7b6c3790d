# SPDX-License-Identifier: Apache-2.0
"""K visual tokens per image, for every kind of image and prompt; everything else untouched."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image
from vllm import LLM, SamplingParams

from tests.support.dialects import prompt_of
from tests.support.engine import (
    GREEDY,
    answer,
    generate,
    media_of,
    request,
    seen,
    visual_tokens,
)
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference

Requests = list[dict[str, Any]]


@pytest.mark.parametrize(
    "image",
    [
        picture(1, mode="RGBA"),
        picture(2, mode="P"),
        picture(3, mode="L"),
        picture(4, mode="1"),
        picture(5, (1, 1)),
        picture(6, (1700, 9)),
        picture(7, (9, 1700)),
        picture(8, (333, 77)),
        Image.new("RGB", (168, 168), "white"),
    ],
    ids=lambda image: f"{image.mode}-{image.width}x{image.height}",
)
def test_any_image_has_k_tokens(pruned: LLM, reference: Reference, image: Image.Image) -> None:
    assert visual_tokens(pruned, reference, request(QUESTIONS[0], image)) == [16]


@pytest.mark.parametrize("size", [(168, 168), (336, 250), (90, 500), (1700, 9)])
def test_budgets(pruned: LLM, reference: Reference, size: tuple[int, int]) -> None:
    image = picture(20, size)
    candidates, unpruned = sum(reference.unit_sizes(image)), reference.unpruned(image)
    budgets: dict[int | str, int] = {
        **{1: 1, "25%": (candidates + 2) // 4, "50%": (candidates + 1) // 2},
        **{candidates - 1: candidates - 1, candidates: unpruned, 9999: unpruned, "100%": unpruned},
    }
    asked = [request(QUESTIONS[1], image, override={"budget": budget}) for budget in budgets]
    assert visual_tokens(pruned, reference, *asked) == list(budgets.values())


def test_many_images_in_one_prompt(pruned: LLM, reference: Reference) -> None:
    images = [picture(30 + i, (100 + 40 * i, 200)) for i in range(8)]
    seen(pruned)
    given = answer(pruned, request(QUESTIONS[2], *images))[0]
    kept = seen(pruned).kept
    assert kept == [reference.kept(image, QUESTIONS[2], 16) for image in images]
    assert given == reference.answer(prompt_of(QUESTIONS[2], 8), images, kept, GREEDY.max_tokens)


def test_no_question(pruned: LLM, reference: Reference) -> None:
    image = picture(40)
    seen(pruned)
    given = answer(pruned, request("", image))[0]
    kept = seen(pruned).kept
    assert kept == [reference.kept(image, "", 16)]
    assert given == reference.answer(prompt_of(""), [image], kept, GREEDY.max_tokens)


def test_several_answers_to_one_request(pruned: LLM) -> None:
    asked = request(QUESTIONS[3], picture(41))

    def sample(n: int, seed: int) -> list[list[int]]:
        params = SamplingParams(n=n, temperature=1, seed=seed, max_tokens=12)
        outputs = generate(pruned, asked, params=params)[0].outputs
        return [list(output.token_ids) for output in outputs]

    together = sample(3, seed=7)
    assert together == [sample(1, seed)[0] for seed in (7, 8, 9)]
    assert len({tuple(ids) for ids in together}) > 1


def test_chat_is_the_same_as_generate(pruned: LLM, reference: Reference) -> None:
    image = picture(42)
    content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": QUESTIONS[4]}]
    chat = pruned.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)[0]
    # A chat template brings its own start token, if any.
    ids = reference.prompt_ids(reference.chat_prompt(QUESTIONS[4]), start=False)
    asked = {"prompt_token_ids": ids, "multi_modal_data": {"image": image}}
    assert list(chat.outputs[0].token_ids) == answer(pruned, asked)[0]


class TestOff:
    """No budget, or a budget of everything: vLLM's own answers."""

    def test_no_budget(
        self, plugin_off: LLM, mixed: Requests, plain_answers: list[list[int]]
    ) -> None:
        assert [answer(plugin_off, item)[0] for item in mixed] == plain_answers

    @pytest.mark.parametrize("budget", ["100%", "just enough", 10_000])
    def test_budget_of_all(
        self,
        pruned: LLM,
        reference: Reference,
        mixed: Requests,
        plain_answers: list[list[int]],
        budget: int | str,
    ) -> None:
        seen(pruned)
        for item, wanted in zip(mixed, plain_answers, strict=True):
            sizes = [sum(reference.unit_sizes(media)) for media in media_of(item)]
            enough = max(sizes, default=1)
            override = {"budget": enough if budget == "just enough" else budget}
            asked = {**item, "mm_processor_kwargs": {"anchorprune": override}}
            assert answer(pruned, asked)[0] == wanted
        assert seen(pruned).kept == []

    def test_text_alone(self, pruned: LLM, mixed: Requests, plain_answers: list[list[int]]) -> None:
        requests, answers = mixed, plain_answers
        text_only = [i for i, item in enumerate(requests) if "multi_modal_data" not in item]
        assert len(text_only) == 2
        assert [answer(pruned, requests[i])[0] for i in text_only] == [
            answers[i] for i in text_only
        ]

    def test_override_without_budget_is_refused(self, plugin_off: LLM) -> None:
        with pytest.raises(ValueError, match="start vLLM with --anchorprune-budget"):
            answer(plugin_off, request(QUESTIONS[0], picture(50), override={"budget": 8}))

# SPDX-License-Identifier: Apache-2.0
"""What the demo asks: trained models, things they can know; the others, anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anchorprune_vllm.commands.eval.clutter import cluttered_scene
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE
from anchorprune_vllm.commands.eval.scores import is_right
from anchorprune_vllm.testing.demo_models.make import TRAINED
from anchorprune_vllm.testing.media import Media, as_data_url, draw_clip, draw_picture

_ANYTHING = "What is to be seen?"


@dataclass(frozen=True)
class DemoQuestion:
    """A question about a picture or clip; no answers: none is right or wrong."""

    media: Media
    text: str
    answers: tuple[str, ...] = ()

    def is_right(self, answer: str) -> bool:
        return is_right(answer, self.answers)


def questions_for(arch: str) -> Callable[[int], DemoQuestion]:
    """Number, also a negative one, to question; each about a picture or clip of its own."""
    if arch in TRAINED:
        return _about_a_scene
    draw = draw_clip if arch == "llava-video" else draw_picture
    return lambda number: DemoQuestion(draw(number), _ANYTHING)


def _about_a_scene(number: int) -> DemoQuestion:
    """Seen by no training; not answered by yes or no, which is right half of the time."""
    picture = cluttered_scene(FIRST_TEST_SCENE + 10**6 + number)
    open_questions = [question for question in picture.questions if question.kind != "yes/no"]
    asked = open_questions[number % len(open_questions)]
    return DemoQuestion(Media("picture", as_data_url(picture.load())), asked.text, asked.answers)

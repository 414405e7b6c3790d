# SPDX-License-Identifier: Apache-2.0
"""The questions of the demo: trained models are asked what they can know, others anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anchorprune_vllm.commands.eval.clutter import cluttered_scene
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE
from anchorprune_vllm.commands.eval.scores import is_right
from anchorprune_vllm.testing.demo_models.make import TRAINED
from anchorprune_vllm.testing.media import Media, as_data_url, draw_clip, draw_picture


@dataclass(frozen=True)
class DemoQuestion:
    """A question about an image or video; without answers, none is right or wrong."""

    media: Media
    text: str
    answers: tuple[str, ...] = ()

    def is_right(self, answer: str) -> bool:
        """Return whether an answer is one of those that are expected."""
        return is_right(answer, self.answers)


def questions_for(arch: str) -> Callable[[int], DemoQuestion]:
    """Return a function from any whole number to a question, each about an image of its own."""
    if arch in TRAINED:
        return _about_a_scene
    draw = draw_clip if arch == "llava-video" else draw_picture
    return lambda number: DemoQuestion(draw(number), "What is to be seen?")


def _about_a_scene(number: int) -> DemoQuestion:
    """Ask about a scene that no training saw, but no yes/no question: half are guessed right."""
    scene = cluttered_scene(FIRST_TEST_SCENE + 10**6 + number)
    open_questions = [question for question in scene.questions if question.kind != "yes/no"]
    asked = open_questions[number % len(open_questions)]
    return DemoQuestion(Media("picture", as_data_url(scene.load())), asked.text, asked.answers)

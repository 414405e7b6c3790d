# SPDX-License-Identifier: Apache-2.0
"""All tiny checkpoints by name, and the engines that serve them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.model_executor.models import registry

from anchorprune_vllm.testing.demo_models.make import DEMO_MODELS, make_demo_model
from anchorprune_vllm.testing.tiny_models import TINY_MODELS
from tests.support.dialects import prompt_of
from tests.support.runners import RUNNERS, engine_on

CHECKPOINTS = (*DEMO_MODELS, *TINY_MODELS)
QUESTION = "What color is the circle?"
MOST_IMAGES = 4


@dataclass
class Checkpoint:
    """A tiny checkpoint on disk, and how it is served."""

    path: Path
    architecture: str
    images: int
    """The most in a prompt."""
    video: str
    """`QUESTION` about a video, as the model's template would write it; empty: it takes none."""
    options: dict[str, Any]
    """Of the engine."""

    @contextmanager
    def served(self, budget: int | None, runner: str = RUNNERS[0], **options: Any) -> Iterator[Any]:
        """Start an engine on it, and end it."""
        limits = {"image": self.images, "video": int(bool(self.video))}
        options = {"limit_mm_per_prompt": limits, **self.options, **options}
        with (
            # vLLM looks at each class in a process of its own, so as not to touch a GPU, and that
            # takes longer than to serve a tiny checkpoint.
            patch.object(registry, "_run_in_subprocess", lambda look: look()),
            engine_on(runner, self.path, budget, **options) as llm,
        ):
            yield llm


def write_checkpoint(name: str, path: Path) -> Checkpoint:
    """Write a tiny checkpoint to a directory."""
    make_demo_model(path, arch=name)
    if name in TINY_MODELS:
        tiny = TINY_MODELS[name]
        turn = f"<|im_start|>user\n{tiny.video}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        return Checkpoint(
            path,
            tiny.architecture,
            tiny.max_images or MOST_IMAGES,
            turn if tiny.video else "",
            {**tiny.engine_arguments},
        )
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    takes_videos = any(key.startswith("video_token_i") for key in config)
    video = prompt_of(QUESTION, images=0, videos=1) if takes_videos else ""
    return Checkpoint(path, config["architectures"][0], MOST_IMAGES, video, {})

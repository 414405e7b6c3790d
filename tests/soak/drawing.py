# SPDX-License-Identifier: Apache-2.0
"""Requests and batches of them, drawn from a seed: the same seed draws the same."""

from __future__ import annotations

import base64
import random
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image as PILImage

from anchorprune_vllm.testing.media import write_clip
from tests.support.asking import as_url
from tests.support.pictures import QUESTIONS, picture

LARGEST_BATCH = 64
_IMAGE_SEEDS = 60
"""The most images, each of which is in several requests or in one."""
_VIDEO_SEEDS = 6
SIZES = [(168, 168), (300, 200), (450, 150), (90, 300), (30, 90), (500, 350)]
_BUDGETS: list[int | str] = [1, 5, 30, 64, 100, "10%", "50%", "80%", "100%", 5000]
_QUERIES = ["turn", "last", "all", "none", "the red circle", "number of people", ""]
_ANSWER_LENGTHS = [1, 8, 16, 40]


class Image(NamedTuple):
    """An image that can be made again."""

    seed: int
    size: tuple[int, int]


class Video(NamedTuple):
    """A video that can be made again."""

    seed: int
    frames: int


class Asked(NamedTuple):
    """One request."""

    parts: tuple[str | Image | Video, ...]
    """The parts of the user's first turn, in their order."""
    follow_up: str
    """The user's second turn; empty: there is none."""
    override: dict[str, int | str] | None
    """The budget and the question that the request brings along."""
    answer_tokens: int

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the chat, as OpenAI clients send it."""
        chat = [{"role": "user", "content": [_as_content(part) for part in self.parts]}]
        if self.follow_up:
            chat.append({"role": "assistant", "content": "Let me look."})
            chat.append({"role": "user", "content": [_as_content(self.follow_up)]})
        return chat

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of `LLM.chat` that carry the override."""
        if self.override is None:
            return {}
        return {"mm_processor_kwargs": {"anchorprune": self.override}}


def draw_pool(
    seed: int,
    count: int,
    most_images: int,
    *,
    videos: bool,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> list[Asked]:
    """Draw distinct requests."""
    rng = random.Random(seed)
    pool: dict[str, Asked] = {}
    while len(pool) < count:
        asked = _draw(rng, min(3, most_images), videos, sizes)
        pool.setdefault(repr(asked), asked)
    return list(pool.values())


def draw_batches(seed: int, pool: int, requests: int) -> Iterator[list[int]]:
    """Draw which requests of a pool are made at once, until there are `requests` in all."""
    rng = random.Random(f"batches {seed}")
    while requests > 0:
        # Half of the batches are small: one request, or a few.
        most = rng.choice([4, LARGEST_BATCH])
        size = min(rng.randint(1, most), requests)
        yield [rng.randrange(pool) for _ in range(size)]
        requests -= size


def _draw(
    rng: random.Random, most_images: int, videos: bool, sizes: Sequence[tuple[int, int]]
) -> Asked:
    parts: list[str | Image | Video] = []
    for _ in range(min(most_images, rng.choice([0, 1, 1, 1, 2, 2, 3]))):
        number = rng.randrange(_IMAGE_SEEDS)
        parts.append(Image(number, sizes[number % len(sizes)]))
    if videos and rng.random() < 0.2:
        # Alone, or with an image before or behind it.
        parts = [*parts[:1], Video(rng.randrange(_VIDEO_SEEDS), rng.choice([2, 4, 7]))]
        rng.shuffle(parts)
    parts.insert(rng.randint(0, len(parts)), rng.choice(QUESTIONS))
    if rng.random() < 0.2:
        parts.append(rng.choice(QUESTIONS))
    override: dict[str, int | str] = {}
    if len(parts) > 1 and rng.random() < 0.7:
        override["budget"] = rng.choice(_BUDGETS)
    if len(parts) > 1 and rng.random() < 0.4:
        override["query"] = rng.choice(_QUERIES)
    follow_up = rng.choice(QUESTIONS) if rng.random() < 0.25 else ""
    return Asked(tuple(parts), follow_up, override or None, rng.choice(_ANSWER_LENGTHS))


def _as_content(part: str | Image | Video) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    name = "image_url" if isinstance(part, Image) else "video_url"
    return {"type": name, name: {"url": _url(part)}}


@cache
def _url(media: Image | Video) -> str:
    if isinstance(media, Image):
        return as_url(picture(*media))
    first, last = (picture(media.seed + place, (224, 160)) for place in (1000, 2000))
    shares = [number / (media.frames - 1) for number in range(media.frames)]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "clip.mp4"
        write_clip(path, [PILImage.blend(first, last, share) for share in shares], fps=2)
        encoded = base64.b64encode(path.read_bytes()).decode()
    return f"data:video/mp4;base64,{encoded}"

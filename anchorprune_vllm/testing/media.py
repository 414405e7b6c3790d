# SPDX-License-Identifier: Apache-2.0
"""Draw images and videos from a seed, and encode them as OpenAI clients send them."""

from __future__ import annotations

import base64
import io
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageDraw

_SIZE = 336
_COLOURS = ("crimson", "gold", "seagreen", "royalblue", "orchid")


@dataclass(frozen=True)
class Media:
    """An image or a video, as a data URL."""

    kind: str
    """`picture` or `clip`."""
    url: str

    def as_message_part(self) -> Any:
        """Return the part of a chat message that holds it."""
        name = {"picture": "image_url", "clip": "video_url"}[self.kind]
        return {"type": name, name: {"url": self.url}}

    def picture(self) -> Image.Image | None:
        """Return the image; None for a video."""
        if self.kind != "picture":
            return None
        _, _, encoded = self.url.partition(",")
        return Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")


def draw_picture(seed: int) -> Media:
    """Draw a few coloured shapes on a plain ground."""
    return Media("picture", as_data_url(_draw(seed, shift=0)))


def draw_clip(seed: int) -> Media:
    """Draw the same shapes on their way to the right: 16 frames in two seconds."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "clip.mp4"
        write_clip(path, [_draw(seed, shift=8 * number) for number in range(16)], fps=8)
        encoded = base64.b64encode(path.read_bytes()).decode()
    return Media("clip", f"data:video/mp4;base64,{encoded}")


def write_clip(path: Path, frames: list[Image.Image], fps: float) -> None:
    """Write an MP4 file of images that have one size."""
    writer = cv2.VideoWriter(
        str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (frames[0].width, frames[0].height)
    )
    if not writer.isOpened():
        raise RuntimeError(
            f"OpenCV cannot write {path}: install a build that has an MPEG-4 encoder"
        )
    for frame in frames:
        writer.write(cv2.cvtColor(np.asarray(frame.convert("RGB")), cv2.COLOR_RGB2BGR))
    writer.release()


def as_data_url(picture: Image.Image) -> str:
    """Return an image as OpenAI clients send it."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _draw(seed: int, shift: int) -> Image.Image:
    rng = random.Random(seed)
    picture = Image.new("RGB", (_SIZE, _SIZE), "white")
    draw = ImageDraw.Draw(picture)
    for _ in range(3):
        x, y, size = rng.randrange(240), rng.randrange(240), rng.randrange(40, 96)
        shape = rng.choice((draw.ellipse, draw.rectangle))
        shape((x + shift, y, x + shift + size, y + size), fill=rng.choice(_COLOURS))
    return picture

# SPDX-License-Identifier: Apache-2.0
"""Pictures, videos and questions made from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

QUESTIONS = (
    "What is in this picture?",
    "Where is the dog?",
    "How many people are there?",
    "Is there a red circle near the top left corner?",
    "Read the text on the sign.",
    "Which colour has the car behind the house?",
    "Describe the scene.",
    "Who is holding the ball, and why?",
)


def picture(seed: int, size: tuple[int, int] = (168, 168), mode: str = "RGB") -> Image.Image:
    """Coarse coloured blocks with fine noise: patches differ, neighbours are alike."""
    rng = np.random.default_rng(seed)
    blocks = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    coarse = np.asarray(blocks.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    noise = rng.integers(-30, 31, coarse.shape)
    pixels = np.clip(coarse + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def clip(
    seed: int, frames: int = 6, size: tuple[int, int] = (336, 336), fps: float = 2.0
) -> tuple[Any, Any]:
    """A video as vLLM takes it: one picture that turns into another, and what is known of it."""
    first, last = (np.asarray(picture(seed + i, size), dtype=np.float32) for i in (0, 10_000))
    shares = np.linspace(0, 1, frames)[:, None, None, None]
    pixels = ((1 - shares) * first + shares * last).astype(np.uint8)
    return as_video(pixels, fps)


def read_clip(path: Path) -> tuple[Any, Any]:
    """All frames of a file, as vLLM takes them."""
    capture = cv2.VideoCapture(str(path))
    frames = []
    while True:
        is_there, frame = capture.read()
        if not is_there:
            break
        frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
    # vLLM leaves it to the model's processor to take fewer, if it has read all of a file.
    return as_video(np.stack(frames), capture.get(cv2.CAP_PROP_FPS), do_sample_frames=True)


def as_video(pixels: np.ndarray, fps: float, *, do_sample_frames: bool = False) -> tuple[Any, Any]:
    """Frames [F, height, width, 3], and what is known of them."""
    return pixels, {
        "fps": fps,
        "duration": len(pixels) / fps,
        "total_num_frames": len(pixels),
        "frames_indices": list(range(len(pixels))),
        "video_backend": "opencv",
        "do_sample_frames": do_sample_frames,
    }

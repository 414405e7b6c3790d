# SPDX-License-Identifier: Apache-2.0
"""Pictures and clips of noise: of any size, and each another one."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from anchorprune_vllm.commands.bench.shapes import Media
from anchorprune_vllm.testing.media import Media as SentMedia
from anchorprune_vllm.testing.media import as_data_url, write_clip

_FPS = 8


def noise(media: Media, seed: int) -> SentMedia:
    """As an OpenAI client sends it."""
    pixels = np.random.default_rng(seed).integers(
        256, size=(media.frames, media.height, media.width, 3), dtype=np.uint8
    )
    frames = [Image.fromarray(frame) for frame in pixels]
    if len(frames) == 1:
        return SentMedia("picture", as_data_url(frames[0]))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "clip.mp4"
        write_clip(path, frames, fps=_FPS)
        encoded = base64.b64encode(path.read_bytes()).decode()
    return SentMedia("clip", f"data:video/mp4;base64,{encoded}")

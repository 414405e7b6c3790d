# SPDX-License-Identifier: Apache-2.0
"""Pictures and questions made from a seed."""

from __future__ import annotations

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

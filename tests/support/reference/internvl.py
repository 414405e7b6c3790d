# SPDX-License-Identifier: Apache-2.0
"""InternVL in transformers' format, and in its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import QianfanOCRConfig, QianfanOCRForConditionalGeneration

from tests.support.reference.base import EAGER, is_image
from tests.support.reference.tiles import TiledReference


class ReferenceInternVL(TiledReference):
    """Importance is the attention of the class token."""

    placeholders = ("<IMG_CONTEXT>", "<video>")
    row_tokens = ("<IMG_CONTEXT>",)
    frame_end = "</img>"

    def _received(self, weights: Tensor) -> Tensor:
        return weights[:, :, 0, 1:].mean(dim=1)


class ReferenceInternVLChat(ReferenceInternVL):
    """Its own format, whose weights transformers reads as those of Qianfan-OCR.

    Tiles are cut as in the code that came with the weights, and the frames of a video numbered.
    """

    placeholders = ("<image>", "<video>")
    row_tokens = ("<IMG_CONTEXT>", "<|video_pad|>")

    def _read_model(self, model: Path) -> Any:
        written = json.loads((model / "config.json").read_text(encoding="utf-8"))
        vision = written["vision_config"] | {"model_type": "qianfan_ocr_vision"}
        config = QianfanOCRConfig(
            **{**written, "model_type": "qianfan_ocr", "vision_config": vision}
        )
        return QianfanOCRForConditionalGeneration.from_pretrained(model, config=config, **EAGER)

    def _written(self, media: Any) -> list[int]:
        if is_image(media):
            return super()._written(media)
        rows = self.row_tokens[1] * self._size()
        frames = (f"Frame{number + 1}: <img>{rows}</img>" for number in range(len(media[0])))
        return self.tokenizer("".join(frames), add_special_tokens=False).input_ids

    def _preprocess(self, media: Any) -> Tensor:
        side, _ = self.model.config.vision_config.image_size
        if is_image(media):
            tiles = _tiles(media, side)
        else:
            tiles = [Image.fromarray(frame).resize((side, side)) for frame in media[0]]
        pixels = torch.tensor(np.stack([np.asarray(tile) for tile in tiles])) / 255
        mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
        return ((pixels - mean) / deviation).permute(0, 3, 1, 2)


def _tiles(image: Image.Image, side: int) -> list[Image.Image]:
    """Tiles row by row, and the whole image behind them."""
    columns, rows = _shape(image, side, most=6)
    whole = image.resize((columns * side, rows * side))
    tiles = [
        whole.crop((x * side, y * side, (x + 1) * side, (y + 1) * side))
        for y in range(rows)
        for x in range(columns)
    ]
    return [*tiles, image.resize((side, side))] if len(tiles) > 1 else tiles


def _shape(image: Image.Image, side: int, most: int) -> tuple[int, int]:
    """Columns and rows of tiles: those nearest to the image's shape.

    Of those that are as near, the largest that the image has at least half of the pixels for.
    """
    shapes = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if c * r <= most]
    best, least = (1, 1), float("inf")
    for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        unlike = abs(image.width / image.height - columns / rows)
        has_pixels = 2 * image.width * image.height > columns * rows * side**2
        if unlike < least or (unlike == least and has_pixels):
            best, least = (columns, rows), unlike
    return best

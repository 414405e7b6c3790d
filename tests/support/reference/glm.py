# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V and GLM-4.5V."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.reference.qwen import ReferenceQwen


class ReferenceGlm(ReferenceQwen):
    """Patches merge as Qwen's do. A frame's rows are an image's, and its time stands behind it."""

    placeholders = ("<|image|>", "<|video|>")
    row_tokens = ("<|image|>",)

    def _run_tower(self, media: Any) -> Any:
        pixels, (frames, rows, columns) = self._preprocess(media)
        grids = torch.tensor([(1, rows, columns)] * frames)
        return self.model.model.visual(pixels, grid_thw=grids)

    def _kinds(self, ids: list[int]) -> list[int]:
        return self.processor.create_mm_token_type_ids([ids])[0]

    def _frames_of(self, written: list[int]) -> list[int]:
        begin = self.tokenizer.convert_tokens_to_ids("<|begin_of_image|>")
        return [written[: place + 1].count(begin) - 1 for place in range(len(written))]

# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and InternVL in transformers' format: squares of patches become a visual token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from tests.support.dialects import in_dialect
from tests.support.reference.words import WordMatchingReference


class _Tiled(WordMatchingReference):
    """Units are the tiles of an image."""

    asked: str
    """What stands for an image in a prompt as it arrives."""
    surroundings: tuple[str, str]
    """What stands before and behind the tokens of an image."""

    def unit_sizes(self, media: Any) -> list[int]:
        return [self._size()] * len(self._preprocess(media))

    def tower_size(self, media: Any) -> int:
        return len(self._preprocess(media))

    def method_signals(self, media: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the general adapter serves no method that needs them")

    def embed(self, media: Any) -> Tensor:
        output = self.model.model.get_image_features(self._preprocess(media), return_dict=True)
        return output.pooler_output.flatten(0, 1)

    def prompt_ids(self, prompt: str, *, start: bool = True) -> list[int]:
        written = in_dialect(prompt, self.tokenizer)
        before, behind = self.surroundings
        written = written.replace(self.asked, f"{before}{self.placeholders[0]}{behind}")
        return self.tokenizer(written, add_special_tokens=start).input_ids

    def _preprocess(self, media: Any) -> Tensor:
        """Tiles [T, 3, height, width]."""
        return self.processor.image_processor(media, return_tensors="pt").pixel_values

    def _of_tokens(self, patches: Tensor) -> np.ndarray:
        """Means [N] over the patches [tiles, P] of each token."""
        token = math.isqrt(patches.shape[1] // self._size())
        side = math.isqrt(self._size())
        squares = patches.double().unflatten(1, (side, token, side, token))
        return squares.mean(dim=(2, 4)).flatten().numpy()


class ReferenceGemma3(_Tiled):
    """One tile. Attention is causal: among the tokens of an image too, as vLLM has it on a CPU."""

    placeholders = ("<image_soft_token>",)
    surroundings = ("\n\n<start_of_image>", "<end_of_image>\n\n")
    asked = "<start_of_image>"

    def received_attention(self, media: Any) -> np.ndarray:
        tower = self.model.model.vision_tower
        weights = tower(self._preprocess(media), output_attentions=True).attentions[-1]
        return self._of_tokens(weights.mean(dim=(1, 2)))

    def _size(self) -> int:
        return self.model.config.mm_tokens_per_image


class ReferenceInternVL(_Tiled):
    """Importance is the attention of the class token."""

    placeholders = ("<IMG_CONTEXT>",)
    surroundings = ("<img>", "</img>")
    asked = "<IMG_CONTEXT>"

    def received_attention(self, media: Any) -> np.ndarray:
        tower = self.model.model.vision_tower
        weights = tower(self._preprocess(media), output_attentions=True).attentions[-1]
        return self._of_tokens(weights[:, :, 0, 1:].mean(dim=1))

    def _size(self) -> int:
        return self.processor.image_seq_length

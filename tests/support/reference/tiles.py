# SPDX-License-Identifier: Apache-2.0
"""Models in which squares of patches become a visual token, and images may become tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tests.support.dialects import in_dialect
from tests.support.reference.base import is_image
from tests.support.reference.selection import Tokens, select_from_each_unit
from tests.support.reference.words import WordMatchingReference


class TiledReference(WordMatchingReference):
    """Units are the tiles of an image. Importance: attention received from an average token."""

    def unit_sizes(self, media: Any) -> list[int]:
        return [self._size()] * len(self._preprocess(media))

    def embed(self, media: Any) -> Tensor:
        output = self.model.model.get_image_features(self._preprocess(media), return_dict=True)
        return output.pooler_output.flatten(0, 1)

    def received_attention(self, media: Any) -> np.ndarray:
        with attention_of(self._tower()) as seen:
            self.embed(media)
        return self._of_tokens(self._received(seen[0]).double())

    def _received(self, weights: Tensor) -> Tensor:
        """Importance of patches [tiles, P], from attention [tiles, heads, tokens, tokens]."""
        return weights.mean(dim=(1, 2))

    def _tower(self) -> nn.Module:
        return self.model.model.vision_tower

    def _size(self) -> int:
        """Visual tokens of a tile."""
        return self.processor.image_seq_length

    def _preprocess(self, media: Any) -> Tensor:
        """Tiles [T, 3, height, width]."""
        return self._once(media, self._inputs).pixel_values

    def _of_tokens(self, patches: Tensor) -> np.ndarray:
        """Means [N] over the patches [tiles, P] of each token."""
        token = math.isqrt(patches.shape[1] // self._size())
        side = math.isqrt(self._size())
        squares = patches.unflatten(1, (side, token, side, token))
        return squares.mean(dim=(2, 4)).flatten().numpy()


@contextmanager
def attention_of(tower: nn.Module) -> Iterator[list[Tensor]]:
    """Weights of a tower's last attention, of each call while entered."""
    names = ("self_attn", "attention")
    last = [part for name, part in tower.named_modules() if name.endswith(names)][-1]
    seen: list[Tensor] = []
    with last.register_forward_hook(lambda module, args, output: seen.append(output[1])):
        yield seen


class ReferenceGemma3(TiledReference):
    """One tile. Attention is causal: among the tokens of an image too, as vLLM has it on a CPU."""

    placeholders = ("<image_soft_token>",)

    def prompt_ids(self, prompt: str, *, start: bool = True) -> list[int]:
        # Ends of lines around an image become one token with those of the text beside it.
        row = self.placeholders[0]
        image = self.processor.full_image_sequence.replace(row * self._size(), row)
        written = in_dialect(prompt, self.tokenizer).replace("<start_of_image>", image)
        return self.tokenizer(written, add_special_tokens=start).input_ids

    def _written(self, media: Any) -> list[int]:
        return self.placeholder_ids() * self._size()

    def _preprocess(self, media: Any) -> Tensor:
        return self.processor.image_processor(media, return_tensors="pt").pixel_values


class _Divided(TiledReference):
    """Tags of tiles stand in the prompt beforehand, so each tile has its share of the budget."""

    def _select(self, tokens: Tokens, relevance: np.ndarray | None, budget: int) -> list[int]:
        return select_from_each_unit(tokens, relevance, budget)


class ReferenceIdefics3(_Divided):
    """Tiles of a large image in rows and columns, and the whole image. SmolVLM has the same."""

    placeholders = ("<image>",)

    def _size(self) -> int:
        return self.processor.image_seq_len

    def _tower(self) -> nn.Module:
        return self.model.model.vision_model

    def _text_parts(self) -> tuple[nn.Module, nn.Module]:
        return self.model.model.text_model, self.model.lm_head

    def _preprocess(self, media: Any) -> Tensor:
        return super()._preprocess(media)[0]

    def embed(self, media: Any) -> Tensor:
        tiles = self._preprocess(media)[None]
        return self.model.model.get_image_features(tiles).pooler_output.flatten(0, 1)


class ReferenceLlama4(_Divided):
    """Tiles with separators behind them, and the whole image."""

    placeholders = ("<|image|>",)
    row_tokens = ("<|patch|>",)

    def _size(self) -> int:
        vision = self.model.config.vision_config
        side = vision.image_size // vision.patch_size * vision.pixel_shuffle_ratio
        return int(side) ** 2

    def _tower(self) -> nn.Module:
        return self.model.vision_model

    def _text_parts(self) -> tuple[nn.Module, nn.Module]:
        return self.model.language_model.model, self.model.language_model.lm_head

    def _preprocess(self, media: Any) -> Tensor:
        return super()._preprocess(media).float()

    def embed(self, media: Any) -> Tensor:
        rows = self.model.get_image_features(self._preprocess(media)).last_hidden_state
        return self.model.multi_modal_projector(rows.flatten(0, 1))

    def _received(self, weights: Tensor) -> Tensor:
        return super()._received(weights)[:, :-1]  # behind the patches is the class token


class ReferenceGemma4(_Divided):
    """One unit of any sides; of a video, one for each frame, which is an image with fewer tokens.

    All text of a video stays. Patches have places, and those of padding are negative.

    A second embedding of each token goes into the layers of the language model. It lies behind the
    columns of the token itself; that of a visual token is the first of the vocabulary's.
    """

    placeholders = ("<|image|>", "<|video|>")

    def _load(self, model: Path) -> None:
        super()._load(model)
        self.width = self.embed_words.embedding_dim
        embed, per_layer = self.embed_words, self.language_model.embed_tokens_per_layer
        self.embed_words = lambda ids: torch.cat([embed(ids), per_layer(ids)], dim=-1)

    def unit_sizes(self, media: Any) -> list[int]:
        return [len(rows) for rows in self._once(media, self._units)]

    def _images(self, media: Any) -> list[Any]:
        """Pixels of an image, or of each frame of a video, and where its patches are."""
        process = self.processor.image_processor
        if is_image(media):
            return [process(media, return_tensors="pt")]
        most = self.processor.video_processor.max_soft_tokens
        frames = map(Image.fromarray, media[0])
        return [process(each, max_soft_tokens=most, return_tensors="pt") for each in frames]

    def _units(self, media: Any) -> list[Tensor]:
        embed = self.model.model.get_image_features
        return [
            embed(each.pixel_values, each.image_position_ids).pooler_output[0]
            for each in self._once(media, self._images)
        ]

    def _rows(self, media: Any) -> Tensor:
        return torch.cat(self._once(media, self._units))

    def embed(self, media: Any) -> Tensor:
        rows = self._rows(media)
        first = self.embed_words(torch.zeros(len(rows), dtype=torch.long))
        return torch.cat([rows, first[:, self.width :]], dim=1)

    def _text_that_stays(self, media: Any, kept: list[int]) -> list[int]:
        places = range(len(self._once(media, self._written)))
        return sorted({*places} - {*self._places_of(media)})

    def received_attention(self, media: Any) -> np.ndarray:
        images = self._once(media, self._images)
        with attention_of(self._tower()) as seen:
            self._units(media)
        return np.concatenate(
            [
                self._received_by_tokens(weights[0], image.image_position_ids[0])
                for weights, image in zip(seen, images, strict=True)
            ]
        )

    def _received_by_tokens(self, weights: Tensor, places: Tensor) -> np.ndarray:
        """From attention [heads, patches, patches] and the patches' columns and rows."""
        is_patch = places[:, 0] >= 0
        weights = weights[:, is_patch][:, :, is_patch].double()  # of real patches alone
        side = self.model.config.vision_config.pooling_kernel_size
        columns, rows = (places[is_patch] // side).T
        token = rows * (columns.max() + 1) + columns
        received = weights.mean(dim=(0, 1))
        return np.array([received[token == number].mean() for number in range(token.max() + 1)])

    def hidden_states(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        layers = len(self.language_model.layers)
        output = self.language_model(
            inputs_embeds=embeddings[..., : self.width],
            per_layer_inputs=embeddings[..., self.width :].unflatten(-1, (layers, -1)),
            position_ids=positions[:, : embeddings.shape[1]],
        )
        return output.last_hidden_state[0]

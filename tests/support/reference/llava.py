# SPDX-License-Identifier: Apache-2.0
"""LLaVA-1.5 and LLaVA-NeXT with their CLIP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, CLIPModel

from tests.support.reference.base import EAGER, Reference, encoder_layers, keys_of
from tests.support.reference.selection import Tokens, normalised


class ReferenceLlava(Reference):
    """One unit: the image."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.clip = CLIPModel.from_pretrained(model / "clip", **EAGER).eval()
        self.clip_tokenizer = AutoTokenizer.from_pretrained(model / "clip")

    def unpruned(self, media: Image.Image) -> int:
        ids = self.processor(images=media, text="<image>").input_ids[0]
        return list(ids).count(self.processor.image_token_id)

    def unit_sizes(self, media: Image.Image) -> list[int]:
        units = [int(unit) for unit, _ in self._candidates(self._preprocess(media))]
        return [units.count(unit) for unit in sorted(set(units))]

    def tower_size(self, media: Image.Image) -> int:
        return len(self._preprocess(media).pixel_values.flatten(0, -4))

    def _tokens(self, media: Image.Image) -> Tokens:
        inputs = self._preprocess(media)
        hidden, out = self._tower(inputs)
        # hidden_states[-2] is the output of the layer whose attention is attentions[-2].
        importance = out.attentions[-2][:, :, 0, 1:].mean(dim=1).double().numpy()
        units, patches = np.array(self._candidates(inputs)).T
        states = self.clip.vision_model.post_layernorm(hidden)
        features = normalised(self.clip.visual_projection(states).double().numpy())
        return Tokens(
            importance=importance[units, patches],
            features=features[units, patches],
            context=normalised(hidden.double().numpy())[units, patches],
            units=units,
        )

    def method_signals(self, media: Image.Image) -> tuple[Tensor, Tensor]:
        inputs = self._preprocess(media)
        layers = encoder_layers(self.model.model.vision_tower)
        with keys_of(layers[-2]) as seen:
            _, out = self._tower(inputs)
        received = out.attentions[len(layers) * 3 // 8].mean(dim=(1, 2))[:, 1:]
        units, patches = np.array(self._candidates(inputs)).T
        return seen[0][:, 1:][units, patches], received[units, patches]

    def _relevance(self, tokens: Tokens, question: str) -> np.ndarray:
        texts = self._text_embeddings(question)
        return -np.mean([tokens.features @ text for text in texts], axis=0)

    def embed(self, media: Image.Image) -> Tensor:
        inputs = self._preprocess(media)
        hidden, _ = self._tower(inputs)
        units, patches = np.array(self._candidates(inputs)).T
        return self.model.model.multi_modal_projector(hidden[units, patches])

    def _embed_merged(self, media: Image.Image, weights: Tensor) -> Tensor:
        inputs = self._preprocess(media)
        units, patches = np.array(self._candidates(inputs)).T
        hidden = self._tower(inputs)[0][units, patches]
        return self.model.model.multi_modal_projector(weights @ hidden)

    def _preprocess(self, image: Image.Image) -> Any:
        return self.processor.image_processor(image, return_tensors="pt")

    def _tower(self, inputs: Any) -> tuple[Tensor, Any]:
        pixels = inputs.pixel_values.flatten(0, -4)  # [units, 3, height, width]
        out = self.model.model.vision_tower(
            pixels, output_attentions=True, output_hidden_states=True
        )
        return out.hidden_states[-2][:, 1:], out

    def _candidates(self, inputs: Any) -> list[tuple[int, int]]:
        """(unit, patch) of every candidate, in the order of the kept tokens."""
        return [(0, patch) for patch in range(self.model.config.image_seq_length)]

    def _text_embeddings(self, question: str) -> list[np.ndarray]:
        words = self.clip_tokenizer(question, add_special_tokens=False).input_ids
        room = self.clip.config.text_config.max_position_embeddings - 2
        start, end = self.clip_tokenizer.bos_token_id, self.clip_tokenizer.eos_token_id
        texts = []
        for i in range(0, len(words), room):
            ids = torch.tensor([[start, *words[i : i + room], end]])
            pooled = self.clip.text_model(input_ids=ids).pooler_output
            texts.append(normalised(self.clip.text_projection(pooled)[0].double().numpy()))
        return texts


class ReferenceLlavaNext(ReferenceLlava):
    """Units are the base view and the crops, as far as they show the picture."""

    def _candidates(self, inputs: Any) -> list[tuple[int, int]]:
        return [divmod(number, self._patches()) for number, _ in self._packed(inputs)]

    def grids(self, media: Image.Image) -> list[tuple[int, int]]:
        candidates = np.array(self._candidates(self._preprocess(media)))
        side = math.isqrt(self._patches())
        grids = []
        for unit in np.unique(candidates[:, 0]):
            patches = candidates[candidates[:, 0] == unit, 1]
            grids.append((len(np.unique(patches // side)), len(np.unique(patches % side))))
        return grids

    def _places_of(self, media: Image.Image) -> list[int]:
        return [place for _, place in self._packed(self._preprocess(media))]

    def _packed(self, inputs: Any) -> list[tuple[int, int]]:
        """Number of every candidate, and where transformers puts it; newlines are -1 there."""
        units, patches = len(inputs.pixel_values[0]), self._patches()
        numbers = torch.arange(units * patches, dtype=torch.float64).view(units, patches, 1)
        (packed,), _ = self.model.model.pack_image_features(
            [numbers], inputs.image_sizes, "default", image_newline=torch.tensor([-1.0])
        )
        shown = [(int(number), place) for place, number in enumerate(packed.flatten())]
        return sorted(pair for pair in shown if pair[0] >= 0)

    def _patches(self) -> int:
        return self.model.config.image_seq_length

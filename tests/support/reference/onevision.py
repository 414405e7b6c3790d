# SPDX-License-Identifier: Apache-2.0
"""LLaVA-OneVision with its SigLIP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, SiglipModel

from tests.support.reference.base import EAGER, Reference, encoder_layers, is_image, keys_of
from tests.support.reference.selection import Tokens, normalised


class ReferenceOnevision(Reference):
    """Units: the base view and the picture that the crops make up; of a video, the frames."""

    placeholders = ("<image>", "<video>")

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.siglip = SiglipModel.from_pretrained(model / "siglip", **EAGER).eval()
        self.siglip_tokenizer = AutoTokenizer.from_pretrained(model / "siglip")

    def _load(self, model: Path) -> None:
        super()._load(model)
        self.config = self.model.config
        self.vision_tower = self.model.model.vision_tower
        self.feature_layer = -1
        self.projector = self.model.model.multi_modal_projector
        self.newline = self.model.model.image_newline
        self.image_processor = self.processor.image_processor
        self.video_processor = self.processor.video_processor

    def unpruned(self, media: Any) -> int:
        return len(self._marked_line(media))

    def unit_sizes(self, media: Any) -> list[int]:
        pixels, sizes = self._preprocess(media)
        marks = torch.zeros(len(pixels), self._patches(), 1)
        if not is_image(media):
            return [len(frame) for frame in self._pool(marks)]
        shown = len(self._pack(marks, sizes)) - self._patches()
        return [self._patches(), shown] if shown else [self._patches()]

    def grids(self, media: Any) -> list[tuple[int, int]]:
        sizes = self.unit_sizes(media)
        if not is_image(media) or len(sizes) == 1:
            return super().grids(media)
        # A newline stands behind every row of the picture.
        newlines = self.unpruned(media) - sum(sizes)
        return [*super().grids(media)[:1], (newlines, sizes[1] // newlines)]

    def tower_size(self, media: Any) -> int:
        return len(self._preprocess(media)[0])

    def embed(self, media: Any) -> Tensor:
        return self._lay_out(media, self.projector(self._tower(media)[0]))

    @torch.inference_mode()
    def embed_unpruned(self, media: Any) -> Tensor:
        """All tokens of the model's own path, newlines included: [T, H]."""
        projected = self.projector(self._tower(media)[0])
        if is_image(media):
            return self._pack(projected, self._preprocess(media)[1], self.newline)
        return self._with_newlines(self._pool(projected))

    @torch.inference_mode()
    def unpruned_answer(self, prompt: str, media: list[Any], n: int) -> list[int]:
        """Greedy answer when all tokens are seen, newlines included."""
        return self.greedy(self.embed_prompt(prompt, [self.embed_unpruned(m) for m in media]), n)

    def _tokens(self, media: Any) -> Tokens:
        hidden, attention = self._tower(media)
        received = attention.double().mean(dim=(1, 2))[..., None]  # [tiles, patches, 1]
        # The head sees one patch at a time.
        alone = self.siglip.vision_model.post_layernorm(hidden).flatten(0, 1)[:, None]
        embedded = self.siglip.vision_model.head(alone).view(hidden.shape)
        sizes = self.unit_sizes(media)
        return Tokens(
            importance=self._lay_out(media, received)[:, 0].numpy(),
            features=normalised(self._lay_out(media, embedded).double().numpy()),
            context=normalised(self._lay_out(media, hidden).double().numpy()),
            units=np.repeat(np.arange(len(sizes)), sizes),
        )

    def method_signals(self, media: Any) -> tuple[Tensor, Tensor]:
        layers = encoder_layers(self.vision_tower)
        with keys_of(layers[self.feature_layer]) as seen:
            out = self.vision_tower(self._preprocess(media)[0], output_attentions=True)
        deep = self.config.vision_config.num_hidden_layers * 3 // 8
        received = out.attentions[deep].mean(dim=(1, 2))[..., None]
        keys = self._lay_out(media, seen[0].flatten(2))
        return keys.unflatten(1, seen[0].shape[2:]), self._lay_out(media, received)[:, 0]

    def _relevance(self, tokens: Tokens, question: str) -> np.ndarray:
        words = self.siglip_tokenizer(question, add_special_tokens=False).input_ids
        length = self.siglip.config.text_config.max_position_embeddings
        texts = []
        for i in range(0, len(words), length - 1):
            part = [*words[i : i + length - 1], self.siglip_tokenizer.eos_token_id]
            part += [self.siglip_tokenizer.pad_token_id] * (length - len(part))
            pooled = self.siglip.text_model(input_ids=torch.tensor([part])).pooler_output
            texts.append(normalised(pooled[0].double().numpy()))
        return -np.mean([tokens.features @ text for text in texts], axis=0)

    def _tower(self, media: Any) -> tuple[Tensor, Tensor]:
        """Hidden states [tiles, patches, D] and attention [tiles, heads, patches, patches]."""
        out = self.vision_tower(
            self._preprocess(media)[0], output_attentions=True, output_hidden_states=True
        )
        return out.hidden_states[self.feature_layer], out.attentions[self.feature_layer]

    def _lay_out(self, media: Any, tiles: Tensor) -> Tensor:
        """Candidates [N, C] from what is given of each patch, [tiles, patches, C]."""
        if is_image(media):
            return self._pack(tiles, self._preprocess(media)[1])
        return self._pool(tiles).flatten(0, 1)

    def _pack(self, tiles: Tensor, sizes: Tensor, newline: Tensor | None = None) -> Tensor:
        (packed,), _ = self._packer().pack_image_features([tiles], sizes, image_newline=newline)
        return packed

    def _packer(self) -> Any:
        return self.model.model

    def _pool(self, frames: Tensor) -> Tensor:
        """[frames, patches, C] to [frames, tokens, C]."""
        return self.model.model.apply_pooling(frames)

    def _with_newlines(self, frames: Tensor) -> Tensor:
        return torch.cat([frames.flatten(0, 1), self.newline[None]])

    def _places_of(self, media: Any) -> list[int]:
        return [place for place, row in enumerate(self._marked_line(media)) if not row.any()]

    def _marked_line(self, media: Any) -> Tensor:
        """The item's tokens [T, H] if all candidates were zero."""
        pixels, sizes = self._preprocess(media)
        zeros = torch.zeros(len(pixels), self._patches(), len(self.newline))
        if is_image(media):
            return self._pack(zeros, sizes, self.newline)
        return self._with_newlines(self._pool(zeros))

    def _patches(self) -> int:
        vision = self.config.vision_config
        return (vision.image_size // vision.patch_size) ** 2

    def _preprocess(self, media: Any) -> tuple[Tensor, Tensor]:
        """Tiles or frames [T, 3, height, width], and an image's size [1, 2]."""
        if is_image(media):
            out = self.image_processor(media, return_tensors="pt")
            return out.pixel_values[0], out.image_sizes
        out = self.video_processor([media[0]], do_sample_frames=False, return_tensors="pt")
        return out.pixel_values_videos[0], torch.empty(0)

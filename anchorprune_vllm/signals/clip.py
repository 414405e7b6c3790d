# SPDX-License-Identifier: Apache-2.0
"""Relevance in CLIP space.

Two small modules of the paired checkpoint put a patch into this space: `post_layernorm`, which the
checkpoint of a LLaVA never trains and vLLM drops, and `visual_projection`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, CLIPModel

from anchorprune_vllm.signals.contrastive import ContrastiveFamily, ContrastivePair


class ClipQueryTokenizer:
    """Tokenizes queries into segments that fit the text tower, each with a start and end token."""

    def __init__(self, text_encoder: str) -> None:
        # Whatever the user writes is ordinary text, even "<|endoftext|>".
        self._tokenizer = AutoTokenizer.from_pretrained(text_encoder, split_special_tokens=True)
        text_config = AutoConfig.from_pretrained(text_encoder).text_config
        # If the files are missing, transformers makes up an empty tokenizer.
        if len(self._tokenizer) != text_config.vocab_size:
            raise ValueError(
                f"{len(self._tokenizer)} tokens for a vocabulary of {text_config.vocab_size}"
            )
        self._words_per_segment = text_config.max_position_embeddings - 2

    def __call__(self, query: str) -> Tensor:
        """Return token ids [segments, length], with short segments padded with end tokens.

        The tower is causal and is read at the first end token, so the padding changes nothing.
        """
        start, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        # A query longer than the tower's context is allowed here, so there is no warning about it.
        words = self._tokenizer(query, add_special_tokens=False, verbose=False).input_ids
        length = min(len(words), self._words_per_segment)
        segments = [words[i : i + length] for i in range(0, len(words), length or 1)]
        rows = [[start, *row, *[end] * (length + 1 - len(row))] for row in segments]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1 if rows else 0)


class ClipPair(ContrastivePair):
    """The parts of a CLIP checkpoint that the model lacks."""

    def __init__(self, text_encoder: str, dtype: torch.dtype, device: torch.device) -> None:
        with torch.device("cpu"):
            clip = CLIPModel.from_pretrained(text_encoder, dtype=dtype).eval()
        # Only the needed parts are moved: CLIP's own vision tower never reaches the device.
        self._text_model = clip.text_model.to(device)
        self._text_projection = clip.text_projection.to(device)
        self._post_layernorm = clip.vision_model.post_layernorm.to(device)
        self._visual_projection = clip.visual_projection.to(device)
        super().__init__(
            [
                self._text_model,
                self._text_projection,
                self._post_layernorm,
                self._visual_projection,
            ],
            device,
        )

    @property
    def width(self) -> int:
        return self._visual_projection.out_features

    def embed_patches(self, hidden: Tensor) -> Tensor:
        return self._visual_projection(self._post_layernorm(hidden))

    def _embed_segments(self, ids: Tensor) -> Tensor:
        return self._text_projection(self._text_model(input_ids=ids).pooler_output)


CLIP = ContrastiveFamily(
    name="CLIP",
    model_type="clip",
    sizes=("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size"),
    known={(1024, 24, 16, 336, 14): "openai/clip-vit-large-patch14-336"},
    query_tokenizer=ClipQueryTokenizer,
    load=ClipPair,
)

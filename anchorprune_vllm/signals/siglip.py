# SPDX-License-Identifier: Apache-2.0
"""Relevance in SigLIP space.

SigLIP has no linear projection of patches: its image embedding comes from a head in which a learned
probe attends to all patches. The embedding of a single patch is the output of that head if it sees
only this patch. The probe's attention to it is then 1, whatever the probe is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, SiglipModel

from anchorprune_vllm.signals.contrastive import ContrastiveFamily, ContrastivePair


class SiglipQueryTokenizer:
    """Tokenizes queries into segments as long as the text tower's context, with end tokens."""

    def __init__(self, text_encoder: str) -> None:
        # Whatever the user writes is ordinary text, even "</s>".
        self._tokenizer = AutoTokenizer.from_pretrained(text_encoder, split_special_tokens=True)
        text_config = AutoConfig.from_pretrained(text_encoder).text_config
        # If the files are missing, transformers makes up an empty tokenizer.
        if not text_config.vocab_size / 2 < len(self._tokenizer) <= text_config.vocab_size:
            raise ValueError(
                f"{len(self._tokenizer)} tokens for a vocabulary of {text_config.vocab_size}"
            )
        self._length = text_config.max_position_embeddings

    def __call__(self, query: str) -> Tensor:
        """Return token ids [segments, length].

        The tower has no mask and is read at its last position, so segments must be padded to the
        full length, as in training.
        """
        words = self._tokenizer(query, add_special_tokens=False, verbose=False).input_ids
        room = self._length - 1
        end, padding = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        segments = [words[i : i + room] for i in range(0, len(words), room)]
        rows = [[*row, end, *[padding] * (room - len(row))] for row in segments]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), self._length)


class SiglipPair(ContrastivePair):
    """The parts of a SigLIP checkpoint that the model lacks."""

    def __init__(self, text_encoder: str, dtype: torch.dtype, device: torch.device) -> None:
        with torch.device("cpu"):
            siglip = SiglipModel.from_pretrained(text_encoder, dtype=dtype).eval()
        # Only the needed parts are moved: SigLIP's own vision tower never reaches the device.
        self._text_model = siglip.text_model.to(device)
        self._post_layernorm = siglip.vision_model.post_layernorm.to(device)
        self._head = siglip.vision_model.head.to(device)
        super().__init__([self._text_model, self._post_layernorm, self._head], device)

    @property
    def width(self) -> int:
        return self._post_layernorm.normalized_shape[0]

    def embed_patches(self, hidden: Tensor) -> Tensor:
        attention = self._head.attention
        # The value projection is the last of the packed query, key and value projections.
        weight, bias = attention.in_proj_weight.chunk(3)[2], attention.in_proj_bias.chunk(3)[2]
        attended = attention.out_proj(F.linear(self._post_layernorm(hidden), weight, bias))
        return attended + self._head.mlp(self._head.layernorm(attended))

    def _embed_segments(self, ids: Tensor) -> Tensor:
        return self._text_model(input_ids=ids).pooler_output


SIGLIP = ContrastiveFamily(
    name="SigLIP",
    model_type="siglip",
    # The number of layers is not compared, because models leave out the last one.
    sizes=("hidden_size", "num_attention_heads", "image_size", "patch_size"),
    known={(1152, 16, 384, 14): "google/siglip-so400m-patch14-384"},
    query_tokenizer=SiglipQueryTokenizer,
    load=SiglipPair,
)

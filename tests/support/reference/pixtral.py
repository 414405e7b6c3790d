# SPDX-License-Identifier: Apache-2.0
"""Mistral Small 3.1, and Pixtral in Mistral's own format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mistral_common.protocol.instruct.chunk import ImageChunk
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
)
from transformers.tokenization_mistral_common import MistralCommonBackend

from tests.support.reference.base import EAGER
from tests.support.reference.tiles import TiledReference, attention_of


class ReferenceMistral3(TiledReference):
    """One unit of any sides, whose rows end with a token of their own: it goes, but the last."""

    placeholders = ("[IMG]",)

    def unit_sizes(self, media: Any) -> list[int]:
        return [len(self.embed(media))]

    def embed(self, media: Any) -> Tensor:
        pixels = self._preprocess(media)
        sizes = torch.tensor([pixels.shape[-2:]])
        output = self.model.model.get_image_features(pixels, image_sizes=sizes, return_dict=True)
        return output.pooler_output[0]

    def received_attention(self, media: Any) -> np.ndarray:
        with attention_of(self._tower()) as seen:
            self.embed(media)
        received = self._received(seen[0]).double()
        side = math.isqrt(received.numel() // sum(self.unit_sizes(media)))
        columns = self._preprocess(media).shape[-1] // self.model.config.vision_config.patch_size
        squares = received.view(-1, side, columns // side, side)
        return squares.mean(dim=(1, 3)).flatten().numpy()

    def _text_that_stays(self, media: Any, kept: list[int]) -> list[int]:
        return super()._text_that_stays(media, kept)[-1:]


_TOWER, _ADAPTER = "vision_encoder.", "vision_language_adapter."
# Parts of the names of weights: Mistral's own, and those that transformers has for them.
_PREFIXES = {
    _TOWER: "model.vision_tower.",
    f"{_ADAPTER}w_in.": "model.multi_modal_projector.linear_1.",
    f"{_ADAPTER}w_out.": "model.multi_modal_projector.linear_2.",
    "output.": "lm_head.",
}
_MATRICES = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_OF_TEXT = _MATRICES | {
    "attention": "self_attn",
    "feed_forward": "mlp",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "tok_embeddings": "embed_tokens",
}


class ReferencePixtral(ReferenceMistral3):
    """A patch is a visual token. Prompts are token ids, those of images included."""

    def _load(self, model: Path) -> None:
        params = json.loads((model / "params.json").read_text())
        weights = load_file(model / "consolidated.safetensors")
        self.model = LlavaForConditionalGeneration._from_config(_config(params), **EAGER).eval()
        self.model.load_state_dict(
            {_renamed(name): _in_halves(name, each, params) for name, each in weights.items()}
        )
        self.tokenizer = MistralCommonBackend.from_pretrained(model)
        self.image_encoder = self.tokenizer.tokenizer.instruct_tokenizer.image_encoder
        self.embed_words = self.model.get_input_embeddings()
        self.language_model, self.lm_head = self._text_parts()

    def given_prompt(self, prompt: str, media: list[Any]) -> dict[str, Any]:
        items = iter(media)
        ids = [
            each
            for token in self.prompt_ids(prompt)
            for each in (self._written(next(items)) if token in self.placeholder_ids() else [token])
        ]
        return {"prompt_token_ids": ids}

    def prompt_ids(self, prompt: str, *, start: bool = True) -> list[int]:
        images, words = prompt.count("<image>"), prompt.replace("<image>", "")
        words = words.removeprefix("USER: ").removesuffix(" ASSISTANT:")
        text = self.tokenizer(words, add_special_tokens=False).input_ids
        tokens = ["<s>"] * start + ["[INST]"] + ["[IMG]"] * images
        return [
            *self.tokenizer.convert_tokens_to_ids(tokens),
            *text,
            self.tokenizer.convert_tokens_to_ids("[/INST]"),
        ]

    def _written(self, media: Any) -> list[int]:
        return self.image_encoder(ImageChunk(image=media)).tokens

    def _preprocess(self, media: Any) -> Tensor:
        return torch.tensor(self.image_encoder(ImageChunk(image=media)).image)[None]


def _config(params: dict[str, Any]) -> LlavaConfig:
    vision = params["vision_encoder"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return LlavaConfig(
        vision_config=PixtralVisionConfig(
            **{name: vision[name] for name in (*names, "image_size", "patch_size")},
            hidden_act="silu",
            rope_parameters={"rope_type": "axial", "rope_theta": vision["rope_theta"]},
        ),
        text_config=MistralConfig(
            vocab_size=params["vocab_size"],
            hidden_size=params["dim"],
            intermediate_size=params["hidden_dim"],
            num_hidden_layers=params["n_layers"],
            num_attention_heads=params["n_heads"],
            num_key_value_heads=params["n_kv_heads"],
            head_dim=params["head_dim"],
            rms_norm_eps=params["norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": params["rope_theta"]},
            sliding_window=None,
        ),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


def _renamed(name: str) -> str:
    """What transformers calls a weight."""
    known = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    parts = _MATRICES if known == _TOWER else _OF_TEXT
    own = ".".join(parts.get(part, part) for part in name.removeprefix(known).split("."))
    return _PREFIXES.get(known, "model.language_model.") + own


def _in_halves(name: str, weight: Tensor, params: dict[str, Any]) -> Tensor:
    """A weight for transformers, which rotates halves of a head where Mistral rotates pairs."""
    if not name.endswith((".wq.weight", ".wk.weight")):
        return weight
    heads = params["n_heads" if ".wq." in name else "n_kv_heads"]
    if name.startswith(_TOWER):
        heads = params["vision_encoder"]["num_attention_heads"]
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)

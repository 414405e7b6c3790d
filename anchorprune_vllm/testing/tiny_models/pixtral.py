# SPDX-License-Identifier: Apache-2.0
"""Pixtral in Mistral's own format."""

import base64
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
)

from anchorprune_vllm.testing.demo_models.tokenizers import WORDS, make_qwen_tokenizer
from anchorprune_vllm.testing.tiny_models.checkpoint import TOWER, random_model, rename

_LARGEST, _PATCH = 252, 14
_SPECIALS = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
]
_WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Parts of a weight's name in transformers → Mistral's own, replaced in this order.
_MISTRAL_NAMES = {
    "model.language_model.": "",
    "model.vision_tower.": "vision_encoder.",
    "model.multi_modal_projector.linear_1": "vision_language_adapter.w_in",
    "model.multi_modal_projector.linear_2": "vision_language_adapter.w_out",
    "lm_head": "output",
    "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "mlp": "feed_forward",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def pixtral() -> "_Pixtral":
    return _Pixtral()


class _Pixtral:
    """The description of a model of which transformers knows the weights, but not the files."""

    architecture_name = "PixtralForConditionalGeneration"
    visual_tokens = (216, 252)
    engine_arguments = dict.fromkeys(("tokenizer_mode", "config_format", "load_format"), "mistral")

    def write(self, directory: Path, seed: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        tokens = _make_tokens()
        model = random_model(
            LlavaForConditionalGeneration,
            _config(len(_SPECIALS) + len(tokens)),
            [len(_SPECIALS) + tokens.index(f" {word}".encode()) for word in WORDS.split()],
            seed,
        )
        save_file(
            {rename(name, _MISTRAL_NAMES): each for name, each in model.state_dict().items()},
            directory / "consolidated.safetensors",
            metadata={"format": "pt"},
        )
        files = {"params.json": _params(model.config), "tekken.json": _tekken(tokens)}
        for name, content in files.items():
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _make_tokens() -> list[bytes]:
    """Return all bytes, and what the merges of Qwen's tokenizer make of them, in their order."""
    tokenizer = make_qwen_tokenizer([])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    merged = (tokenizer.decoder.decode([a + b]).encode() for a, b in merges)
    return list(dict.fromkeys([*(bytes([byte]) for byte in range(256)), *merged]))


def _tekken(tokens: list[bytes]) -> dict[str, Any]:
    return {
        "config": {
            "pattern": _WORD_PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(_SPECIALS) + len(tokens),
            "default_num_special_tokens": len(_SPECIALS),
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(_SPECIALS)
        ],
        "version": 1,
        "type": "tekken",
        "image": {
            "image_patch_size": _PATCH,
            "max_image_size": _LARGEST,
            "spatial_merge_size": 1,
        },
    }


def _config(vocabulary: int) -> LlavaConfig:
    return LlavaConfig(
        vision_config=PixtralVisionConfig(**TOWER, image_size=_LARGEST, patch_size=_PATCH),
        text_config=MistralConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
        ),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


def _params(config: LlavaConfig) -> dict[str, Any]:
    text = config.text_config
    token_id = _SPECIALS.index
    return {
        "dim": text.hidden_size,
        "n_layers": text.num_hidden_layers,
        "head_dim": text.head_dim,
        "hidden_dim": text.intermediate_size,
        "n_heads": text.num_attention_heads,
        "n_kv_heads": text.num_key_value_heads,
        "norm_eps": text.rms_norm_eps,
        "rope_theta": 1e6,
        "vocab_size": text.vocab_size,
        "max_seq_len": text.max_position_embeddings,
        "max_position_embeddings": text.max_position_embeddings,
        "vision_encoder": {
            **TOWER,
            "num_channels": 3,
            "image_size": _LARGEST,
            "max_image_size": _LARGEST,
            "patch_size": _PATCH,
            "rope_theta": 1e4,
            "adapter_bias": True,
            "image_token_id": token_id("[IMG]"),
            "image_break_token_id": token_id("[IMG_BREAK]"),
            "image_end_token_id": token_id("[IMG_END]"),
        },
    }

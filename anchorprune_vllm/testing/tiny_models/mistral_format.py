# SPDX-License-Identifier: Apache-2.0
"""Write a tiny model in Mistral's own format, of which transformers only knows the weights."""

import base64
import json
from pathlib import Path
from typing import Any

import transformers

from anchorprune_vllm.testing.demo_models.files import write_checkpoint_files
from anchorprune_vllm.testing.demo_models.tokenizers import WORDS, make_qwen_tokenizer
from anchorprune_vllm.testing.tiny_models.description import (
    LANGUAGE_MODEL,
    TOWER,
    Config,
    TinyModel,
)
from anchorprune_vllm.testing.tiny_models.hub_format import make_random_model, rename

# fmt: off
_SPECIALS = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
]
_WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MISTRAL_NAMES = {
    "model.language_model.": "", "model.vision_tower.": "vision_encoder.",
    "model.multi_modal_projector.linear_1": "vision_language_adapter.w_in",
    "model.multi_modal_projector.linear_2": "vision_language_adapter.w_out",
    "lm_head": "output", "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
    "mlp": "feed_forward", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
}
"""Part of a weight's name in transformers → Mistral's own, replaced in this order."""
# fmt: on


def write_mistral_format(tiny: TinyModel, directory: Path, seed: int) -> None:
    """Write the files that Mistral's own release of a model has."""
    tokens = _make_tokens()
    text = {**LANGUAGE_MODEL, "vocab_size": len(_SPECIALS) + len(tokens), **tiny.text}
    model_class = getattr(transformers, tiny.model_class)
    config = model_class.config_class(text_config=text, vision_config=tiny.vision, **tiny.config)
    word_ids = [len(_SPECIALS) + tokens.index(f" {word}".encode()) for word in WORDS.split()]
    model = make_random_model(model_class, config, word_ids, seed)
    weights = {rename(name, _MISTRAL_NAMES): each for name, each in model.state_dict().items()}
    files = {"params.json": _params(config), "tekken.json": _tekken(tokens, tiny.vision)}
    write_checkpoint_files(directory, weights, files, "consolidated.safetensors")


def _make_tokens() -> list[bytes]:
    """Return all bytes, and what the merges of Qwen's tokenizer make of them, in their order."""
    tokenizer = make_qwen_tokenizer([])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    merged = (tokenizer.decoder.decode([a + b]).encode() for a, b in merges)
    return list(dict.fromkeys([*(bytes([byte]) for byte in range(256)), *merged]))


# fmt: off
def _tekken(tokens: list[bytes], vision: Config) -> Config:
    return {
        "config": {
            "pattern": _WORD_PATTERN, "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(_SPECIALS) + len(tokens),
            "default_num_special_tokens": len(_SPECIALS), "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(_SPECIALS)
        ],
        "version": 1, "type": "tekken",
        "image": {"image_patch_size": vision["patch_size"], "max_image_size": vision["image_size"],
                  "spatial_merge_size": 1},
    }


def _params(config: Any) -> Config:
    text, vision = config.text_config, config.vision_config
    return {
        "dim": text.hidden_size, "n_layers": text.num_hidden_layers, "head_dim": text.head_dim,
        "hidden_dim": text.intermediate_size, "n_heads": text.num_attention_heads,
        "n_kv_heads": text.num_key_value_heads, "norm_eps": text.rms_norm_eps, "rope_theta": 1e6,
        "vocab_size": text.vocab_size, "max_seq_len": text.max_position_embeddings,
        "max_position_embeddings": text.max_position_embeddings,
        "vision_encoder": {
            **{name: getattr(vision, name) for name in TOWER},
            "num_channels": 3, "image_size": vision.image_size,
            "max_image_size": vision.image_size, "patch_size": vision.patch_size,
            "rope_theta": 1e4, "adapter_bias": True,
            "image_token_id": _SPECIALS.index("[IMG]"),
            "image_break_token_id": _SPECIALS.index("[IMG_BREAK]"),
            "image_end_token_id": _SPECIALS.index("[IMG_END]"),
        },
    }

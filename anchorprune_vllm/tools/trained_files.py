# SPDX-License-Identifier: Apache-2.0
"""The trained demo model: its sizes, its words, and its files.

A LLaVA-1.5 of 144 visual tokens and its CLIP, trained by `examples/train_demo_model.py`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from anchorprune_vllm.tools import demo_llava
from anchorprune_vllm.tools.demo_tokenizers import make_clip_tokenizer, make_llama_tokenizer
from anchorprune_vllm.tools.demo_weights import Config, Weights

IMAGE_SIZE = 168
_WORDS = "is what does the a not no image contain present shape teal rectangle letter A B C E H T"


@cache
def tokenizer() -> Tokenizer:
    """The language model's."""
    return make_llama_tokenizer(["<image>", "<pad>"], _WORDS)


@cache
def clip_tokenizer() -> Tokenizer:
    return make_clip_tokenizer(_WORDS.lower())


def clip_config() -> Config:
    config = demo_llava.clip_config(clip_tokenizer().get_vocab_size(), IMAGE_SIZE)
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 384}
    config["text_config"] |= {**sizes, "num_hidden_layers": 2, "projection_dim": 64}
    config["vision_config"] |= {**sizes, "num_hidden_layers": 4, "projection_dim": 64}
    return config | {"projection_dim": 64}


def llava_config() -> Config:
    config = demo_llava.llava_config(tokenizer(), clip_config()["vision_config"])
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config["text_config"] |= {**sizes, "intermediate_size": 384, "num_hidden_layers": 3}
    return config


def llama_config() -> Config:
    return llava_config()["text_config"]


def write_trained(out: Path, model: Any, scores: dict[str, Any]) -> None:
    """Weights of `examples/train_demo_model.py`'s model in bfloat16, under the hub's names."""
    state: Weights = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }
    clip = _under("clip.", state)
    llava = {
        f"vision_tower.{name}": weight
        for name, weight in clip.items()
        if name.startswith("vision_model.")
    }
    llava |= {
        f"multi_modal_projector.{_PROJECTOR[name]}": weight
        for name, weight in _under("projector.", state).items()
    }
    llava |= {
        f"language_model.{name}": weight
        for name, weight in _under("language_model.", state).items()
    }
    dtype = {"dtype": "bfloat16"}
    demo_llava.write_clip_files(out / "clip", clip_config() | dtype, clip, clip_tokenizer())
    # As in training, a prompt begins with <s>, which servers leave to the template.
    template = "{{- bos_token -}}\n" + demo_llava.CHAT_TEMPLATE
    demo_llava.write_llava_files(out, llava_config() | dtype, llava, tokenizer(), template)
    (out / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")


def read_trained(out: Path, model: nn.Module) -> None:
    """The opposite of `write_trained`."""
    llava, clip = (load_file(at / "model.safetensors") for at in (out, out / "clip"))
    state = {f"clip.{name}": weight for name, weight in clip.items()}
    names = {hub: own for own, hub in _PROJECTOR.items()}
    for name, weight in _under("multi_modal_projector.", llava).items():
        state[f"projector.{names[name]}"] = weight
    for name, weight in _under("language_model.", llava).items():
        state[f"language_model.{name}"] = weight
    model.load_state_dict({name: weight.float() for name, weight in state.items()})


_PROJECTOR = {
    "0.weight": "linear_1.weight",
    "0.bias": "linear_1.bias",
    "2.weight": "linear_2.weight",
    "2.bias": "linear_2.bias",
}


def _under(prefix: str, state: Weights) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): weight
        for name, weight in state.items()
        if name.startswith(prefix)
    }

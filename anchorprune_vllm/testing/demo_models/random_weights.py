# SPDX-License-Identifier: Apache-2.0
"""Weights of the demo models: random, under the hub's names.

They are scaled so that answers depend on picture and question, and the signals of pruning are far
from uniform.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer

from anchorprune_vllm.testing.demo_models.tokenizers import WORDS

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Entries of a demo model's configs that are to be other than those of the tiny one."""

    text: Config = field(default_factory=dict)
    vision: Config = field(default_factory=dict)
    """Of the tower with all its layers; the LLaVAs use all but the last."""
    text_encoder: Config = field(default_factory=dict)


TINY = Sizes()


class RandomWeights:
    """One seeded stream of weights."""

    def __init__(self, seed: int) -> None:
        self._stream = torch.Generator().manual_seed(seed)

    def table(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self._stream) * scale

    def linear(self, name: str, out: int, in_: int, gain: float = 1, bias: float = 0) -> Weights:
        """Outputs have `gain` times the deviation of the inputs."""
        return self._layer(name, self.table(out, in_, scale=gain * in_**-0.5), bias)

    def norm(self, name: str, size: int, bias: float = 0) -> Weights:
        """Not the identity, so that a norm left out shows."""
        return self._layer(name, 1 + self.table(size, scale=0.2), bias)

    def _layer(self, name: str, weight: torch.Tensor, bias: float) -> Weights:
        biases = {f"{name}.bias": self.table(len(weight), scale=bias)} if bias else {}
        return {f"{name}.weight": weight, **biases}


def _clip_layers(
    draw: RandomWeights, prefix: str, config: Config, qk: float, vo: float, qk_bias: float = 0.1
) -> Weights:
    """The encoder layers of either tower. High `qk`: attention chooses; high `vo`: it counts.

    High `qk_bias`: all queries share it, and so agree on what they look at.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    weights: Weights = {}
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}.encoder.layers.{i}"
        for name in ("q_proj", "k_proj"):
            weights |= draw.linear(f"{layer}.self_attn.{name}", hidden, hidden, qk, qk_bias)
        for name in ("v_proj", "out_proj"):
            weights |= draw.linear(f"{layer}.self_attn.{name}", hidden, hidden, vo, bias=0.1)
        weights |= draw.linear(f"{layer}.mlp.fc1", inner, hidden, bias=0.1)
        weights |= draw.linear(f"{layer}.mlp.fc2", hidden, inner, bias=0.1)
        weights |= draw.norm(f"{layer}.layer_norm1", hidden, bias=0.1)
        weights |= draw.norm(f"{layer}.layer_norm2", hidden, bias=0.1)
    return weights


def vision_tower(draw: RandomWeights, config: Config) -> Weights:
    hidden, patch = config["hidden_size"], config["patch_size"]
    positions = (config["image_size"] // patch) ** 2 + 1
    embeddings = "vision_model.embeddings"
    return {
        f"{embeddings}.class_embedding": draw.table(hidden),
        f"{embeddings}.patch_embedding.weight": draw.table(hidden, 3, patch, patch, scale=0.04),
        f"{embeddings}.position_embedding.weight": draw.table(positions, hidden, scale=0.4),
        **draw.norm("vision_model.pre_layrnorm", hidden, bias=0.1),  # the hub spells it so
        **_clip_layers(draw, "vision_model", config, qk=1.5, vo=1.0),
        # A large bias, the same for all patches, brings cosine distances down to around tau.
        **draw.norm("vision_model.post_layernorm", hidden, bias=0.8),
    }


def clip_without_vision_tower(draw: RandomWeights, config: Config) -> Weights:
    text, joint = config["text_config"], config["projection_dim"]
    hidden, positions = text["hidden_size"], text["max_position_embeddings"]
    embeddings = "text_model.embeddings"
    return {
        **_clip_layers(draw, "text_model", text, qk=2.0, vo=1.5),
        **draw.norm("text_model.final_layer_norm", hidden, bias=0.1),
        **draw.linear("text_projection", joint, hidden),
        **draw.linear("visual_projection", joint, config["vision_config"]["hidden_size"]),
        # Small, so that at the end token what attention brings outweighs the token itself.
        f"{embeddings}.token_embedding.weight": draw.table(text["vocab_size"], hidden, scale=0.3),
        f"{embeddings}.position_embedding.weight": draw.table(positions, hidden, scale=0.1),
        "logit_scale": torch.tensor(config["logit_scale_init_value"]),
    }


def siglip_vision_tower(draw: RandomWeights, config: Config) -> Weights:
    """Without the pooling head: models leave it out."""
    hidden, patch = config["hidden_size"], config["patch_size"]
    positions = (config["image_size"] // patch) ** 2
    embeddings = "vision_model.embeddings"
    return {
        f"{embeddings}.patch_embedding.weight": draw.table(hidden, 3, patch, patch, scale=0.04),
        f"{embeddings}.patch_embedding.bias": draw.table(hidden, scale=0.1),
        f"{embeddings}.position_embedding.weight": draw.table(positions, hidden, scale=0.4),
        **_clip_layers(draw, "vision_model", config, qk=2.0, vo=1.0, qk_bias=1.0),
        # A large bias, the same for all patches, brings cosine distances down to around tau.
        **draw.norm("vision_model.post_layernorm", hidden, bias=0.8),
    }


def siglip_without_vision_tower(draw: RandomWeights, config: Config) -> Weights:
    """Text tower, and the head that pools the patches."""
    text, vision = config["text_config"], config["vision_config"]
    hidden, positions = text["hidden_size"], text["max_position_embeddings"]
    joint, inner = vision["hidden_size"], vision["intermediate_size"]
    embeddings, head = "text_model.embeddings", "vision_model.head"
    return {
        **_clip_layers(draw, "text_model", text, qk=2.0, vo=1.5),
        **draw.norm("text_model.final_layer_norm", hidden, bias=0.1),
        **draw.linear("text_model.head", joint, hidden, bias=0.1),
        f"{embeddings}.token_embedding.weight": draw.table(text["vocab_size"], hidden, scale=0.3),
        f"{embeddings}.position_embedding.weight": draw.table(positions, hidden, scale=0.1),
        f"{head}.probe": draw.table(1, 1, joint),
        f"{head}.attention.in_proj_weight": draw.table(3 * joint, joint, scale=joint**-0.5),
        f"{head}.attention.in_proj_bias": draw.table(3 * joint, scale=0.5),
        **draw.linear(f"{head}.attention.out_proj", joint, joint, bias=0.1),
        **draw.norm(f"{head}.layernorm", joint, bias=0.1),
        **draw.linear(f"{head}.mlp.fc1", inner, joint, bias=0.1),
        **draw.linear(f"{head}.mlp.fc2", joint, inner, bias=0.1),
        "logit_scale": torch.tensor([config["logit_scale_init_value"]]),
        "logit_bias": torch.tensor([-10.0]),
    }


def projector(draw: RandomWeights, config: Config) -> Weights:
    hidden, visual = config["text_config"]["hidden_size"], config["vision_config"]["hidden_size"]
    return {
        **draw.linear("multi_modal_projector.linear_1", hidden, visual, bias=0.1),
        **draw.linear("multi_modal_projector.linear_2", hidden, hidden, bias=0.1),
    }


def qwen_vision_tower(draw: RandomWeights, config: Config) -> Weights:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    patch, frames = config["patch_size"], config["temporal_patch_size"]
    merged, out = hidden * config["spatial_merge_size"] ** 2, config["out_hidden_size"]
    weights = {
        "visual.patch_embed.proj.weight": draw.table(hidden, 3, frames, patch, patch, scale=0.03),
        **draw.norm("visual.merger.ln_q", hidden),
        **draw.linear("visual.merger.mlp.0", merged, merged, bias=0.1),
        # A bias, the same for all tokens, brings cosine distances down to around tau.
        **draw.linear("visual.merger.mlp.2", out, merged, bias=0.5),
    }
    for i in range(config["depth"]):
        block = f"visual.blocks.{i}"
        # All queries share the bias: so they agree on the patches they look at.
        weights |= draw.linear(f"{block}.attn.qkv", 3 * hidden, hidden, 2.5, bias=1.5)
        weights |= draw.linear(f"{block}.attn.proj", hidden, hidden, bias=0.1)
        weights |= draw.linear(f"{block}.mlp.gate_proj", inner, hidden, bias=0.1)
        weights |= draw.linear(f"{block}.mlp.up_proj", inner, hidden, bias=0.1)
        weights |= draw.linear(f"{block}.mlp.down_proj", hidden, inner, bias=0.1)
        weights |= draw.norm(f"{block}.norm1", hidden)
        weights |= draw.norm(f"{block}.norm2", hidden)
    return weights


def language_model(
    draw: RandomWeights,
    config: Config,
    tokenizer: Tokenizer,
    *,
    prefix: str = "language_model.",
    space: str = "▁",
    qkv_bias: float = 0,
) -> Weights:
    """It answers in words: the head's other rows are zero, and zero is never the highest.

    `space` is what the tokenizer makes of the space before a word.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    words = [tokenizer.token_to_id(space + word) for word in WORDS.split()]
    head = torch.zeros(config["vocab_size"], hidden)
    head[words] = draw.table(len(words), hidden, scale=3 * hidden**-0.5)
    weights = {
        f"{prefix}lm_head.weight": head,
        f"{prefix}model.embed_tokens.weight": draw.table(config["vocab_size"], hidden),
        **draw.norm(f"{prefix}model.norm", hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}model.layers.{i}"
        # So sharp an attention that single patches and words decide; below 2, answers repeat.
        for name, gain in {"q_proj": 2.5, "k_proj": 2.5, "v_proj": 1.5}.items():
            weights |= draw.linear(f"{layer}.self_attn.{name}", hidden, hidden, gain, qkv_bias)
        weights |= draw.linear(f"{layer}.self_attn.o_proj", hidden, hidden, 1.5)
        weights |= draw.linear(f"{layer}.mlp.gate_proj", inner, hidden)
        weights |= draw.linear(f"{layer}.mlp.up_proj", inner, hidden)
        weights |= draw.linear(f"{layer}.mlp.down_proj", hidden, inner)
        weights |= draw.norm(f"{layer}.input_layernorm", hidden)
        weights |= draw.norm(f"{layer}.post_attention_layernorm", hidden)
    return weights

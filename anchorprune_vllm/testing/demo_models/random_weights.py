# SPDX-License-Identifier: Apache-2.0
"""Random weights of the demo models, under the hub's names.

They are scaled so that answers depend on image and question, and so that the signals of pruning are
far from uniform.
"""

from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from anchorprune_vllm.testing.demo_models.tokenizers import WORDS
from anchorprune_vllm.testing.tiny_models.description import Config as Config

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Entries of a demo model's configurations that replace those of the tiny one."""

    text: Config = field(default_factory=dict)
    vision: Config = field(default_factory=dict)
    """The tower's, with all its layers; the LLaVAs use all but the last."""
    text_encoder: Config = field(default_factory=dict)


TINY = Sizes()


class RandomWeights:
    """A seeded stream of weights."""

    def __init__(self, seed: int) -> None:
        self._stream = torch.Generator().manual_seed(seed)

    def table(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return normally distributed numbers."""
        return torch.randn(shape, generator=self._stream) * scale

    def linear(self, name: str, out: int, in_: int, gain: float = 1, bias: float = 0) -> Weights:
        """Return a layer whose outputs have `gain` times the deviation of its inputs."""
        return self._layer(name, self.table(out, in_, scale=gain * in_**-0.5), bias)

    def norm(self, name: str, size: int, bias: float = 0) -> Weights:
        """Return a norm that is not the identity, so that one that is left out shows."""
        return self._layer(name, 1 + self.table(size, scale=0.2), bias)

    def _layer(self, name: str, weight: torch.Tensor, bias: float) -> Weights:
        biases = {f"{name}.bias": self.table(len(weight), scale=bias)} if bias else {}
        return {f"{name}.weight": weight, **biases}


def language_model(
    draw: RandomWeights,
    config: Config,
    tokenizer: Tokenizer,
    prefix: str,
    space: str = "Ġ",
    qkv_bias: float = 0.5,
) -> Weights:
    """Return a Llama or Qwen that answers in words.

    The head's other rows are zero, and zero is never the highest logit. `space` is what the
    tokenizer makes of the space before a word.
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
        # Attention is so sharp that single patches and words decide; below 2, answers repeat.
        for name, gain in {"q_proj": 2.5, "k_proj": 2.5, "v_proj": 1.5}.items():
            weights |= draw.linear(f"{layer}.self_attn.{name}", hidden, hidden, gain, qkv_bias)
        weights |= draw.linear(f"{layer}.self_attn.o_proj", hidden, hidden, 1.5)
        weights |= draw.linear(f"{layer}.mlp.gate_proj", inner, hidden)
        weights |= draw.linear(f"{layer}.mlp.up_proj", inner, hidden)
        weights |= draw.linear(f"{layer}.mlp.down_proj", hidden, inner)
        weights |= draw.norm(f"{layer}.input_layernorm", hidden)
        weights |= draw.norm(f"{layer}.post_attention_layernorm", hidden)
    return weights

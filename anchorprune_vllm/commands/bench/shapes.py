# SPDX-License-Identifier: Apache-2.0
"""Models with random weights in the proportions of the 7B models, as small as a machine needs.

The cost of a prompt is, for each part of a model, parameters x tokens. A shape keeps the tokens of
the real model (576 for an image of LLaVA-1.5, 5 x 576 for LLaVA-NeXT) and divides the parameters of
language model, vision tower and text encoder by the same number:

    LLaVA-1.5-7B   language model   32 x (4 x 4096² + 3 x 4096 x 11008) = 6,476 M, x 576 and text
                   vision tower     23 x (4 x 1024² + 2 x 1024 x 4096)  =   289 M, x 577
    at scale 1     language model    8 x (4 x 1024² + 3 x 1024 x  2752) =   101 M, x 576 and text
                   vision tower      6 x (4 x  256² + 2 x  256 x   960) =   4.5 M, x 577

Widths shrink less than parameters do, so two costs weigh more here than in the 7B model: selection
(N x K x D operations to choose K of N tokens of width D), and attention, which adds N / (6 D) to
the other operations of the language model. `describe_costs` gives the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from anchorprune_vllm.commands.bench.flops import QWEN_7B, VICUNA_7B, Transformer
from anchorprune_vllm.testing.demo_models.random_weights import Config, Sizes

_PARAMETERS = 105e6  # of the language model at scale 1, about
_WIDTH, _HEAD = 1024, 64  # of the language model at scale 1
_TOWER_HEAD = 32


class MediaSize(NamedTuple):
    """The size of the image or video in each request."""

    width: int
    height: int
    frames: int = 1

    def __str__(self) -> str:
        return "x".join(map(str, self if self.frames > 1 else self[:2]))

    @classmethod
    def parse(cls, text: str) -> MediaSize:
        """Read WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES."""
        parts = text.lower().split("x")
        if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(f"{text!r} is not WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, as 672x672")
        return cls(*map(int, parts))


@dataclass(frozen=True)
class ModelShape:
    """A 7B model, and the image or video that a benchmark of it sends."""

    arch: str
    image_size: int
    media: MediaSize
    language_model: Transformer
    tower: Transformer  # the layers that are used
    text_encoder: Transformer | None
    tower_tokens: int  # of one image or video
    tokens: int  # those of them that reach the language model unpruned
    default_scale: float = 1.0


_CLIP, _CLIP_TEXT = Transformer(23, 1024, 4096), Transformer(12, 768, 3072)
_SIGLIP, _SIGLIP_TEXT = Transformer(26, 1152, 4304), Transformer(27, 1152, 4304)

MODEL_SHAPES = {
    "llava-1.5": ModelShape(
        *("llava-1.5", 336, MediaSize(336, 336), VICUNA_7B, _CLIP, _CLIP_TEXT),
        tower_tokens=577,
        tokens=576,
    ),
    "llava-next": ModelShape(
        *("llava-next", 336, MediaSize(672, 672), VICUNA_7B, _CLIP, _CLIP_TEXT),
        tower_tokens=5 * 577,
        tokens=5 * 576 + 48,  # a newline after each row of the crops
        default_scale=0.3,
    ),
    "qwen2.5-vl": ModelShape(
        *("qwen2.5-vl", 168, MediaSize(1008, 1008), QWEN_7B, Transformer(32, 1280, 3420, 3), None),
        tower_tokens=72 * 72,
        tokens=36 * 36,
    ),
    "llava-video": ModelShape(
        *("llava-video", 378, MediaSize(320, 240, 16), QWEN_7B, _SIGLIP, _SIGLIP_TEXT),
        tower_tokens=16 * 27 * 27,
        tokens=16 * 13 * 14,  # pooled, with a newline after each row
        default_scale=0.3,
    ),
}


def scaled(shape: ModelShape, scale: float) -> tuple[Transformer, Transformer, Transformer | None]:
    """Give language model, tower and text encoder the same share of the 7B model's parameters."""
    width = max(2, round(_WIDTH * scale ** (1 / 4) / _HEAD)) * _HEAD
    inner = width * shape.language_model.inner // shape.language_model.hidden // 16 * 16
    layer = Transformer(1, width, inner, shape.language_model.mlp_matrices)
    layers = max(1, round(_PARAMETERS * scale / layer.parameters))
    language_model = replace(layer, layers=layers)
    share = language_model.parameters / shape.language_model.parameters
    encoder = shape.text_encoder
    return language_model, _shrunk(shape.tower, share), encoder and _shrunk(encoder, share)


def _shrunk(part: Transformer, share: float) -> Transformer:
    """Shrink a transformer to a share of its parameters; the width of its MLP makes it exact."""
    wanted = share * part.parameters
    width = max(2, round(part.hidden * share ** (1 / 3) / 32)) * 32
    inner = width * part.inner / part.hidden
    layers = max(1, round(wanted / (4 * width**2 + part.mlp_matrices * width * inner)))
    inner = (wanted / layers - 4 * width**2) / (part.mlp_matrices * width)
    return Transformer(layers, width, max(16, round(inner / 8) * 8), part.mlp_matrices)


def sizes_of(shape: ModelShape, scale: float) -> Sizes:
    """Return the scaled sizes as `make_demo_model` takes them."""
    language_model, tower, text_encoder = scaled(shape, scale)
    text = _layers_of(language_model, _HEAD)
    text["num_key_value_heads"] = text["num_attention_heads"]
    if shape.arch == "qwen2.5-vl":
        vision: Config = {
            "hidden_size": tower.hidden,
            "intermediate_size": tower.inner,
            "depth": tower.layers,
            "num_heads": tower.hidden // _TOWER_HEAD,
            "out_hidden_size": language_model.hidden,
            # As far apart as in the 7B model, where every eighth block has full attention.
            "fullatt_block_indexes": [*range(7, tower.layers, 8)] or [tower.layers - 1],
        }
        return Sizes(text, vision)
    assert text_encoder is not None
    vision = _layers_of(replace(tower, layers=tower.layers + 1))  # the last one is not used
    encoder = _layers_of(text_encoder)
    if shape.arch in ("llava-1.5", "llava-next"):
        encoder["projection_dim"] = tower.hidden * 3 // 4  # as 768 to 1024
    return Sizes(text, vision, encoder)


def _layers_of(part: Transformer, head_size: int = _TOWER_HEAD) -> Config:
    return {
        "hidden_size": part.hidden,
        "intermediate_size": part.inner,
        "num_hidden_layers": part.layers,
        "num_attention_heads": part.hidden // head_size,
    }


def describe_costs(shape: ModelShape, scale: float) -> list[str]:
    """Say what language model and tower cost in the 7B model and at this scale, a line for each."""
    language_model, tower, _ = scaled(shape, scale)
    rows = {"7B": (shape.language_model, shape.tower), f"scale {scale:g}": (language_model, tower)}
    lines = []
    for name, (language, vision) in rows.items():
        prefill, encode = language.parameters * shape.tokens, vision.parameters * shape.tower_tokens
        attention = language.flops(shape.tokens) / (2 * prefill) - 1
        lines.append(
            f"{name}: language model {language.parameters / 1e6:,.1f} M x {shape.tokens:,} visual "
            f"tokens, vision tower {vision.parameters / 1e6:,.2f} M x {shape.tower_tokens:,}: "
            f"{2 * prefill / 1e9:,.0f} and {2 * encode / 1e9:,.1f} GFLOP, "
            f"{prefill / encode:.1f} to 1; attention adds {attention:.0%} to the language model's"
        )
    return lines

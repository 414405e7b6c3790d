# SPDX-License-Identifier: Apache-2.0
"""Models with random weights in the proportions of the 7B models, as small as a machine needs.

What a prompt costs is, for each part of a model, parameters x tokens. Tokens are the real ones: 576
of a LLaVA-1.5 picture, 5 x 576 of LLaVA-NeXT, and so on. Parameters are those of the 7B model,
divided by one number for language model, vision tower and text encoder alike:

    LLaVA-1.5-7B   language model   32 x (4 x 4096² + 3 x 4096 x 11008) = 6,476 M, x 576 and text
                   vision tower     23 x (4 x 1024² + 2 x 1024 x 4096)  =   289 M, x 577
    at scale 1     language model    8 x (4 x 1024² + 3 x 1024 x  2752) =   101 M, x 576 and text
                   vision tower      6 x (4 x  256² + 2 x  256 x   960) =   4.5 M, x 577

Two things do not shrink alike, because widths shrink less than parameters. Choosing K of N tokens
of width D is N x K x D: selection weighs more here than in the 7B model. And attention is about
N / (6 D) of the rest: so does it, and more of it goes away with the tokens. `arithmetic` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anchorprune_vllm.commands.bench.flops import Transformer
from anchorprune_vllm.testing.demo_models.random_weights import Config, Sizes

_LANGUAGE_MODEL = 105e6  # parameters at scale 1, about
_WIDTH = 1024  # of the language model at scale 1
_HEAD = 64


@dataclass(frozen=True)
class Media:
    """What each request carries: a picture, or a clip of several frames."""

    width: int
    height: int
    frames: int = 1

    def __str__(self) -> str:
        frames = f"x{self.frames}" if self.frames > 1 else ""
        return f"{self.width}x{self.height}{frames}"

    @classmethod
    def parse(cls, text: str) -> Media:
        """From WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES."""
        parts = text.lower().split("x")
        if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(f"{text!r} is not WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, as 672x672")
        return cls(*map(int, parts))


@dataclass(frozen=True)
class Shape:
    """A 7B model, and what is asked about in a benchmark of it."""

    arch: str
    image_size: int
    media: Media
    language_model: Transformer
    tower: Transformer
    """As far as it is used."""
    text_encoder: Transformer | None
    tower_tokens: int
    """Of one picture or clip."""
    tokens: int
    """Of those, as the language model gets them unpruned."""
    default_scale: float = 1.0


_VICUNA = Transformer(32, 4096, 11008, 3)
_QWEN = Transformer(28, 3584, 18944, 3, key_value_size=512)
_CLIP, _CLIP_TEXT = Transformer(23, 1024, 4096), Transformer(12, 768, 3072)
_SIGLIP, _SIGLIP_TEXT = Transformer(26, 1152, 4304), Transformer(27, 1152, 4304)

SHAPES = {
    "llava-1.5": Shape(
        *("llava-1.5", 336, Media(336, 336), _VICUNA, _CLIP, _CLIP_TEXT),
        tower_tokens=577,
        tokens=576,
    ),
    "llava-next": Shape(
        *("llava-next", 336, Media(672, 672), _VICUNA, _CLIP, _CLIP_TEXT),
        tower_tokens=5 * 577,
        tokens=5 * 576 + 48,  # a newline behind each row of the crops
        default_scale=0.3,
    ),
    "qwen2.5-vl": Shape(
        *("qwen2.5-vl", 168, Media(1008, 1008), _QWEN, Transformer(32, 1280, 3420, 3), None),
        tower_tokens=72 * 72,
        tokens=36 * 36,
    ),
    "llava-video": Shape(
        *("llava-video", 378, Media(320, 240, 16), _QWEN, _SIGLIP, _SIGLIP_TEXT),
        tower_tokens=16 * 27 * 27,
        tokens=16 * 13 * 14,  # pooled, a newline behind each row
        default_scale=0.3,
    ),
}


def scaled(shape: Shape, scale: float) -> tuple[Transformer, Transformer, Transformer | None]:
    """Language model, tower and text encoder with the same share of the 7B model's parameters."""
    wanted = _LANGUAGE_MODEL * scale
    width = max(2, round(_WIDTH * scale ** (1 / 4) / _HEAD)) * _HEAD
    inner = width * shape.language_model.inner // shape.language_model.hidden // 16 * 16
    layer = Transformer(1, width, inner, shape.language_model.mlp_matrices)
    language_model = replace(layer, layers=max(1, round(wanted / layer.parameters)))
    share = language_model.parameters / shape.language_model.parameters
    parts = [
        None if part is None else _share_of(part, share)
        for part in (shape.tower, shape.text_encoder)
    ]
    assert parts[0] is not None
    return language_model, parts[0], parts[1]


def _share_of(part: Transformer, share: float) -> Transformer:
    """A transformer of that share of the parameters, its MLP as wide as makes it exact."""
    wanted = share * part.parameters
    width = max(2, round(part.hidden * share ** (1 / 3) / 32)) * 32
    inner = width * part.inner / part.hidden
    layer = 4 * width**2 + part.mlp_matrices * width * inner
    layers = max(1, round(wanted / layer))
    inner = (wanted / layers - 4 * width**2) / (part.mlp_matrices * width)
    return Transformer(layers, width, max(16, round(inner / 8) * 8), part.mlp_matrices)


def sizes_of(shape: Shape, scale: float) -> Sizes:
    """The same for `make_demo_model`."""
    language_model, tower, text_encoder = scaled(shape, scale)
    heads = language_model.hidden // _HEAD
    text = {
        "hidden_size": language_model.hidden,
        "intermediate_size": language_model.inner,
        "num_hidden_layers": language_model.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    vision: Config
    if shape.arch == "qwen2.5-vl":
        vision = {
            "hidden_size": tower.hidden,
            "intermediate_size": tower.inner,
            "depth": tower.layers,
            "num_heads": tower.hidden // 32,
            "out_hidden_size": language_model.hidden,
            # As far apart as the 7B model's: every eighth, of 32.
            "fullatt_block_indexes": _last_of_eighths(tower.layers),
        }
        return Sizes(text, vision)
    assert text_encoder is not None
    vision = _layers_of(tower) | {"num_hidden_layers": tower.layers + 1}  # the last is not used
    encoder = _layers_of(text_encoder)
    if shape.arch in ("llava-1.5", "llava-next"):
        encoder["projection_dim"] = tower.hidden * 3 // 4  # 768 of 1024
    return Sizes(text, vision, encoder)


def _layers_of(part: Transformer) -> Config:
    return {
        "hidden_size": part.hidden,
        "intermediate_size": part.inner,
        "num_hidden_layers": part.layers,
        "num_attention_heads": part.hidden // 32,
    }


def _last_of_eighths(layers: int) -> list[int]:
    return [number for number in range(layers) if number % 8 == 7] or [layers - 1]


def arithmetic(shape: Shape, scale: float) -> Sequence[str]:
    """Parameters x tokens of both parts, of the 7B model and at this scale: a line each."""
    language_model, tower, _ = scaled(shape, scale)
    rows = {"7B": (shape.language_model, shape.tower), f"scale {scale:g}": (language_model, tower)}
    lines = []
    for name, (language, vision) in rows.items():
        reads, sees = language.parameters * shape.tokens, vision.parameters * shape.tower_tokens
        attention = language.flops(shape.tokens) / (2 * reads) - 1
        lines.append(
            f"{name}: language model {language.parameters / 1e6:,.1f} M x {shape.tokens:,} visual "
            f"tokens, vision tower {vision.parameters / 1e6:,.2f} M x {shape.tower_tokens:,}: "
            f"{2 * reads / 1e9:,.0f} and {2 * sees / 1e9:,.1f} GFLOP, {reads / sees:.1f} to 1; "
            f"attention adds {attention:.0%} to the language model's"
        )
    return lines

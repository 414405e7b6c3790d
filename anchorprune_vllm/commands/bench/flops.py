# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of one prompt, by formula: vision tower and prefill.

A product of a matrix of P entries with T rows is 2 P T operations. Attention adds, in a layer of
width D, 4 T S D for T tokens that see S each: scores and weighted sum. (In a causal model half of
that would do; kernels and papers count it whole.) Norms, activations, the choice of tokens and the
language model's head, which sees one token, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

_QWEN = "qwen2_5_vl"
_LLAVAS = ("llava", "llava_next", "llava_onevision", "llava_qwen")


@dataclass(frozen=True)
class Transformer:
    """The linear layers of a stack of equal layers, and the width of its attention."""

    layers: int
    hidden: int
    inner: int
    mlp_matrices: int = 2
    """3 where the MLP has a gate."""
    key_value_size: int | None = None
    """Of keys, and of values; None: as `hidden`."""

    @property
    def parameters(self) -> int:
        key_value = self.hidden if self.key_value_size is None else self.key_value_size
        attention = 2 * self.hidden * (self.hidden + key_value)
        return self.layers * (attention + self.mlp_matrices * self.hidden * self.inner)

    def flops(self, tokens: int, seen: int | None = None) -> int:
        """Of so many tokens, each of which sees `seen`; None: all of them."""
        seen = tokens if seen is None else seen
        return 2 * self.parameters * tokens + self.layers * 4 * tokens * seen * self.hidden


@dataclass(frozen=True)
class Tower:
    """A vision tower as far as it is used, and what carries its outputs to the language model."""

    blocks: Transformer
    projector: int
    """Parameters."""
    projected_per_patch: float = 1.0
    """Tokens that go through the projector for each patch."""
    window: int | None = None
    """Patches that see each other in all but some blocks; None: all of a tile do, in all."""
    whole_blocks: int = 0
    """Blocks without windows."""

    def flops(self, tiles: int, patches: int) -> int:
        """Of so many tiles (crops, frames) of so many patches each; a [CLS] counts as one."""
        one = self.blocks.flops(patches)
        if self.window is not None:
            in_windows = self.blocks.flops(patches, min(self.window, patches))
            one = in_windows + (one - in_windows) * self.whole_blocks // self.blocks.layers
        return tiles * (one + int(2 * self.projector * patches * self.projected_per_patch))

    def importance_flops(self, patches: int) -> int:
        """Of the attention that each patch of a tile receives in one block.

        A GPU multiplies queries with keys twice: once for the sum of each row, and once to add up
        columns. That is what one more block's attention would cost.
        """
        return 4 * patches**2 * self.blocks.hidden


def language_model_of(config: Any) -> Transformer:
    """Of an HF config of a model with a Llama- or Qwen2-like language model."""
    text = config.get_text_config()
    head_size = text.hidden_size // text.num_attention_heads
    return Transformer(
        text.num_hidden_layers,
        text.hidden_size,
        text.intermediate_size,
        mlp_matrices=3,
        key_value_size=text.num_key_value_heads * head_size,
    )


def tower_of(config: Any) -> Tower | None:
    """Of an HF config; None: not known for this architecture."""
    if config.model_type not in (_QWEN, *_LLAVAS):
        return None
    vision, text = config.vision_config, config.get_text_config()
    if config.model_type == _QWEN:
        merged = vision.hidden_size * vision.spatial_merge_size**2
        return Tower(
            Transformer(vision.depth, vision.hidden_size, vision.intermediate_size, 3),
            projector=merged * (merged + vision.out_hidden_size),
            projected_per_patch=1 / vision.spatial_merge_size**2,
            window=(vision.window_size // vision.patch_size) ** 2,
            whole_blocks=len(vision.fullatt_block_indexes),
        )
    # Counted from the end, -1 is the last layer's output.
    layers = vision.num_hidden_layers + 1 + config.vision_feature_layer
    return Tower(
        Transformer(layers, vision.hidden_size, vision.intermediate_size),
        projector=text.hidden_size * (vision.hidden_size + text.hidden_size),
    )


def tiles_of(config: Any, width: int, height: int, frames: int) -> tuple[int, int]:
    """Tiles of a picture or video, and patches of each, as the vision tower gets them."""
    vision = config.vision_config
    if config.model_type == _QWEN:
        unit = vision.patch_size * vision.spatial_merge_size
        sides = [round(side / unit) * vision.spatial_merge_size for side in (height, width)]
        return -(-frames // vision.temporal_patch_size), prod(sides)
    patches = (vision.image_size // vision.patch_size) ** 2
    if frames > 1:
        return frames, patches
    class_tokens = int(vision.model_type == "clip_vision_model")
    return 1 + _crops(config, width, height), patches + class_tokens


def _crops(config: Any, width: int, height: int) -> int:
    if config.model_type == "llava":
        return 0
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

    rows, columns = get_anyres_image_grid_shape(
        (height, width), config.image_grid_pinpoints, config.vision_config.image_size
    )
    return rows * columns

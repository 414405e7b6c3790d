# SPDX-License-Identifier: Apache-2.0
"""Compute the floating-point operations of a prompt: of the vision tower and of the prefill.

Multiplying T rows by a matrix of P entries takes 2 P T operations. In a layer of width D, attention
adds 4 T S D for T tokens that each attend to S tokens. A causal kernel could skip half of these,
but papers count all of them. Norms, activations, token selection and the language model's head
(which sees one token) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any

_QWEN = "qwen2_5_vl"
_LLAVAS = ("llava", "llava_next", "llava_onevision", "llava_qwen")


@dataclass(frozen=True)
class Transformer:
    """The linear layers of a stack of equal layers, and the width of its attention."""

    layers: int
    hidden: int
    inner: int
    mlp_matrices: int = 2  # 3 if the MLP has a gate
    key_value_size: int | None = None  # of the keys, and of the values; None: as `hidden`

    @property
    def parameters(self) -> int:
        """Entries of all matrices."""
        key_value = self.hidden if self.key_value_size is None else self.key_value_size
        attention = 2 * self.hidden * (self.hidden + key_value)
        return self.layers * (attention + self.mlp_matrices * self.hidden * self.inner)

    def flops(self, tokens: int, attended: int | None = None) -> int:
        """Count the operations for tokens that each attend to `attended` tokens (default: all)."""
        attended = tokens if attended is None else attended
        return 2 * self.parameters * tokens + self.layers * 4 * tokens * attended * self.hidden


VICUNA_7B = Transformer(32, 4096, 11008, 3)
QWEN_7B = Transformer(28, 3584, 18944, 3, key_value_size=512)


@dataclass(frozen=True)
class Tower:
    """The blocks of a vision tower that are used, and the projector to the language model."""

    blocks: Transformer
    projector: int  # parameters
    projected_per_patch: float = 1.0  # tokens that pass through the projector, for each patch
    window: int | None = None  # patches that attend to each other; None: all patches of a tile do
    full_blocks: int = 0  # blocks without windows

    def flops(self, tiles: int, patches: int) -> int:
        """Count the operations for tiles (crops, frames) of so many patches; a [CLS] is a patch."""
        tile = self.blocks.flops(patches)
        if self.window is not None:
            windowed = self.blocks.flops(patches, min(self.window, patches))
            tile = windowed + (tile - windowed) * self.full_blocks // self.blocks.layers
        return tiles * (tile + int(2 * self.projector * patches * self.projected_per_patch))

    def importance_flops(self, patches: int) -> int:
        """Count the operations that find the attention received by each patch in one block.

        The GPU kernels multiply queries by keys twice: to sum up rows, then to add up columns.
        That takes as much as the attention of one more block.
        """
        return 4 * patches**2 * self.blocks.hidden


def language_model_of(config: Any) -> Transformer:
    """Read the sizes of a Llama- or Qwen2-like language model from a Hugging Face config."""
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
    """Read the sizes of a vision tower from a Hugging Face config; None: unknown architecture."""
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
            full_blocks=len(vision.fullatt_block_indexes),
        )
    # Layers are counted from the end: -1 is the output of the last one.
    layers = vision.num_hidden_layers + 1 + config.vision_feature_layer
    return Tower(
        Transformer(layers, vision.hidden_size, vision.intermediate_size),
        projector=text.hidden_size * (vision.hidden_size + text.hidden_size),
    )


def tiles_of(config: Any, width: int, height: int, frames: int) -> tuple[int, int]:
    """Return how many tiles the vision tower gets of an image or video, and patches of each."""
    vision = config.vision_config
    if config.model_type == _QWEN:
        unit = vision.patch_size * vision.spatial_merge_size
        sides = [round(side / unit) * vision.spatial_merge_size for side in (height, width)]
        return ceil(frames / vision.temporal_patch_size), prod(sides)
    patches = (vision.image_size // vision.patch_size) ** 2
    if frames > 1:
        return frames, patches
    patches += int(vision.model_type == "clip_vision_model")  # [CLS]
    if config.model_type == "llava":
        return 1, patches
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

    crops = get_anyres_image_grid_shape(
        (height, width), config.image_grid_pinpoints, vision.image_size
    )
    return 1 + prod(crops), patches

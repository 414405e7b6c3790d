# SPDX-License-Identifier: Apache-2.0
"""What models with a CLIP vision tower share: the tower with its importance, and their pruner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import CLIPVisionConfig
from vllm.config import VllmConfig

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.logger import log_active
from anchorprune_vllm.models.pruned import PrunedModel, mean_over_heads
from anchorprune_vllm.positions import CHANNELS
from anchorprune_vllm.processor import PruningProcessor
from anchorprune_vllm.signals.attention import cls_attention, tap_attention
from anchorprune_vllm.signals.clip import (
    ClipPair,
    ClipQueryTokenizer,
    ClipSignals,
    check_files,
    find_text_encoder,
)


def text_encoder_of(hf_config: Any, config: PruneConfig) -> str:
    """The CLIP checkpoint paired with the model's vision tower; ValueError if there is none."""
    vision_config = hf_config.vision_config
    if not isinstance(vision_config, CLIPVisionConfig):
        raise ValueError(
            f"anchorprune: this model's vision tower is a {vision_config.model_type!r}; pruning of "
            f"{hf_config.model_type!r} models needs a CLIP tower ('clip_vision_model')"
        )
    return find_text_encoder(vision_config, config.text_encoder)


def encode_tiles(model: Any, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
    """Run a LLaVA-like model's tower on [B, 3, H, W] and take [CLS] attention on the way.

    Returns hidden [B, N, D] and importance float32 [B, N].
    """
    last_layer = model.vision_tower.vision_model.encoder.layers[-1]
    attention = last_layer.self_attn.attn
    with tap_attention(attention, _cls_attention) as taken:
        hidden = model._image_pixels_to_features(model.vision_tower, pixel_values)
    (importance,) = taken
    importance = mean_over_heads(
        importance, attention, model.config.vision_config.num_attention_heads
    )
    # The tower may have dropped [CLS], the first token, from its output.
    return hidden, importance[:, -hidden.shape[1] :]


def _cls_attention(query: Tensor, key: Tensor, attention: Any) -> Tensor:
    # The heads are those of this rank.
    return cls_attention(query, key, attention.num_heads, attention.scale)


class ClipPruningProcessor(PruningProcessor):
    """Mixin: prompts with K placeholders per image, queries written for CLIP's text tower."""

    def _media_token_ids(self) -> Mapping[str, int]:
        return {"image": self.info.get_hf_config().image_token_index}

    def _text_encoder(self) -> str:
        return text_encoder_of(self.info.get_hf_config(), self.prune_config)

    def _make_query_tokenizer(self, text_encoder: str) -> ClipQueryTokenizer:
        return ClipQueryTokenizer(text_encoder)


class ClipPrunedModel(PrunedModel):
    """Mixin: list it before the vLLM model that it extends."""

    @classmethod
    def check(cls, model_config: Any, config: PruneConfig) -> None:
        layer = model_config.hf_config.vision_feature_layer
        if not isinstance(layer, int):
            raise ValueError(
                f"anchorprune: this model takes a list of layers from its vision tower "
                f"(vision_feature_layer {layer}); pruning needs a single number"
            )
        check_files(text_encoder_of(model_config.hf_config, config))

    @classmethod
    def use_native_positions(cls, hf_config: Any) -> None:
        # On the whole model's config: the language model's own keeps ordinary rotary embeddings.
        hf_config.mrope_section = [1] * CHANNELS

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._native_positions:
            # All channels are equal. Behind the language model's last position there is none.
            text_config = self.config.get_text_config()  # type: ignore[attr-defined]
            positions = positions[0].clamp(max=text_config.max_position_embeddings - 1)
        return super().forward(  # type: ignore[misc]
            input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
        )

    def _media_token_ids(self) -> list[int]:
        return [self.config.image_token_index]  # type: ignore[attr-defined]

    def _make_signals(self, config: PruneConfig, vllm_config: VllmConfig) -> ClipSignals:
        model_config = vllm_config.model_config
        text_encoder = text_encoder_of(model_config.hf_config, config)
        log_active(config, text_encoder)
        pair = ClipPair(text_encoder, model_config.dtype, vllm_config.device_config.device)
        # vLLM's deep sleep drops all memory, but saves and restores what the model has as buffers.
        for number, tensor in enumerate(pair.tensors()):
            self.register_buffer(  # type: ignore[attr-defined]
                f"anchorprune_{number}", tensor, persistent=False
            )
        return ClipSignals(pair)

    def _feature_shape(self) -> tuple[int, int]:
        embeddings = self.vision_tower.vision_model.embeddings  # type: ignore[attr-defined]
        return embeddings.num_positions, embeddings.embed_dim

# SPDX-License-Identifier: Apache-2.0
"""What models share whose vision tower is one half of a CLIP or SigLIP pair."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.logger import log_active
from anchorprune_vllm.models.linear_positions import LinearPositionsModel
from anchorprune_vllm.models.pruned import mean_over_heads
from anchorprune_vllm.processor import PruningProcessor, QueryTokenizer
from anchorprune_vllm.pruner import Signals
from anchorprune_vllm.signals.attention import Measure, tap_attention
from anchorprune_vllm.signals.text_pair import PairFamily, TextPair


def encode_tiles(model: Any, pixel_values: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """Run a LLaVA-like model's tower on [B, 3, H, W] and measure its last attention on the way.

    measure: query and key to float32 [B, T], summed over the heads of this rank.
    Returns hidden [B, N, D] and importance float32 [B, N].
    """
    attention = model.vision_tower.vision_model.encoder.layers[-1].self_attn.attn
    with tap_attention(attention, measure) as taken:
        hidden = model._image_pixels_to_features(model.vision_tower, pixel_values)
    (summed,) = taken
    importance = mean_over_heads(summed, attention, model.config.vision_config.num_attention_heads)
    # A tower with [CLS], the first token, may have dropped it from its output.
    return hidden, importance[:, -hidden.shape[1] :]


class PairedPruningProcessor(PruningProcessor):
    """Mixin: queries written for the text tower of the pair."""

    pair_family: PairFamily

    def _text_encoder(self) -> str:
        vision_config = self.info.get_hf_config().vision_config
        return self.pair_family.find(vision_config, self.prune_config.text_encoder)

    def _make_query_tokenizer(self, text_encoder: str) -> QueryTokenizer:
        return self.pair_family.query_tokenizer(text_encoder)


class PairedPrunedModel(LinearPositionsModel):
    """Mixin: list it before the vLLM model that it extends."""

    pair_family: PairFamily

    @classmethod
    def check(cls, model_config: Any, config: PruneConfig) -> None:
        layer = model_config.hf_config.vision_feature_layer
        if not isinstance(layer, int):
            raise ValueError(
                f"anchorprune: this model takes a list of layers from its vision tower "
                f"(vision_feature_layer {layer}); pruning needs a single number"
            )
        vision_config = model_config.hf_config.vision_config
        cls.pair_family.check_files(cls.pair_family.find(vision_config, config.text_encoder))

    def _make_signals(self, config: PruneConfig, vllm_config: VllmConfig) -> Signals:
        model_config = vllm_config.model_config
        vision_config = model_config.hf_config.vision_config
        text_encoder = self.pair_family.find(vision_config, config.text_encoder)
        log_active(config, text_encoder)
        device = vllm_config.device_config.device
        pair = self.pair_family.load(text_encoder, model_config.dtype, device)
        # vLLM's deep sleep drops all memory, but saves and restores what the model has as buffers.
        for number, tensor in enumerate(pair.tensors()):
            self.register_buffer(  # type: ignore[attr-defined]
                f"anchorprune_{number}", tensor, persistent=False
            )
        return self._signals_of(pair)

    @abstractmethod
    def _signals_of(self, pair: TextPair) -> Signals:
        """Signals in the pair's space."""

# SPDX-License-Identifier: Apache-2.0
"""What models share whose vision tower is one half of a CLIP or SigLIP pair."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from anchorprune_vllm.api.processor import PruningProcessor, QueryTokenizer
from anchorprune_vllm.config import PruneConfig, Similarity
from anchorprune_vllm.log import active_line, logger
from anchorprune_vllm.methods.registry import method_of
from anchorprune_vllm.models.linear_positions import LinearPositionsModel
from anchorprune_vllm.models.pruned_model import keys_of_all_heads, mean_over_heads
from anchorprune_vllm.signals.attention import Measure, received_attention, tap_attention
from anchorprune_vllm.signals.contrastive import PairFamily, TextPair
from anchorprune_vllm.signals.plain import PlainSignals
from anchorprune_vllm.worker.feature_cache import MediaFeatures
from anchorprune_vllm.worker.pruner import Signals


def encode_tiles(model: Any, pixel_values: Tensor, measure: Measure) -> MediaFeatures:
    """Run a LLaVA-like model's tower on [B, 3, H, W] and take what is needed from its attention.

    measure: query and key to importance float32 [B, T], summed over the heads of this rank.
    Returns features of all tiles, [B, N, ...] each.
    """
    layers = model.vision_tower.vision_model.encoder.layers
    heads = model.config.vision_config.num_attention_heads
    last = layers[-1].self_attn.attn
    with ExitStack() as taps:
        if "importance" in model.needs:
            summed = taps.enter_context(tap_attention(last, measure))
        if "keys" in model.needs:
            keys = taps.enter_context(tap_attention(last, _keys))
        if "object_attention" in model.needs:
            middle = layers[_object_layer(model)].self_attn.attn
            received = taps.enter_context(tap_attention(middle, tile_attention))
        hidden = model._image_pixels_to_features(model.vision_tower, pixel_values)
    parts = {}
    if "importance" in model.needs:
        parts["importance"] = mean_over_heads(summed.pop(), last, heads)
    if "keys" in model.needs:
        parts["keys"] = keys_of_all_heads(keys.pop(), last, heads)
    if "object_attention" in model.needs:
        parts["object_attention"] = mean_over_heads(received.pop(), middle, heads)
    # A tower with [CLS], the first token, may have dropped it from its output.
    tokens = hidden.shape[1]
    return MediaFeatures(hidden, **{name: part[:, -tokens:] for name, part in parts.items()})


def tile_attention(query: Tensor, key: Tensor, attention: Any) -> Tensor:
    """What tokens receive within their tile, summed over the heads of this rank: [B, T]."""
    batch, tokens, _ = key.shape
    by_head = (batch * tokens, attention.num_heads, -1)
    return received_attention(
        query.reshape(by_head), key.reshape(by_head), [tokens] * batch, attention.scale
    ).view(batch, tokens)


def _keys(query: Tensor, key: Tensor, attention: Any) -> Tensor:
    return key.unflatten(-1, (attention.num_heads, -1))


def _object_layer(model: Any) -> int:
    """HiPrune's: 9 of 24, and as deep in other towers."""
    return model.config.vision_config.num_hidden_layers * 3 // 8


class PairedPruningProcessor(PruningProcessor):
    """Mixin: queries written for the text tower of the pair."""

    pair_family: PairFamily

    def _text_encoder(self) -> str | None:
        vision_config = self.info.get_hf_config().vision_config
        return text_encoder_of(self.pair_family, vision_config, self.prune_config)

    def _make_query_tokenizer(self, text_encoder: str | None) -> QueryTokenizer:
        if text_encoder is None:
            return lambda query: torch.empty(0, 0, dtype=torch.int64)
        return self.pair_family.query_tokenizer(text_encoder)


def text_encoder_of(family: PairFamily, vision_config: Any, config: PruneConfig) -> str | None:
    """Return the checkpoint of the text tower; None for methods that compare nothing with words.

    Raises ValueError if a text tower that is needed cannot be found.
    """
    if "features" not in method_of(config).needs:
        return None
    return family.find(vision_config, config.text_encoder)


def _as_buffers(pair: TextPair) -> nn.Module:
    """What a pair has on the device, as a part of the model that loads no weights.

    vLLM's deep sleep drops all memory, but saves and restores what the model has as buffers.
    """
    holder = nn.Module()
    for number, tensor in enumerate(pair.tensors()):
        # No checkpoint of the model has them: when vLLM loads weights again, it must not wait.
        tensor.weight_loader_numel = 0  # type: ignore[attr-defined]
        holder.register_buffer(str(number), tensor, persistent=False)
    return holder


class PairedPrunedModel(LinearPositionsModel):
    """Mixin: list it before the vLLM model that it extends."""

    pair_family: PairFamily

    @classmethod
    def fits(cls, hf_config: Any) -> bool:
        return hf_config.vision_config.model_type == f"{cls.pair_family.model_type}_vision_model"

    @classmethod
    def check(cls, model_config: Any, config: PruneConfig) -> None:
        layer = model_config.hf_config.vision_feature_layer
        if not isinstance(layer, int):
            raise ValueError(
                f"anchorprune: this model takes a list of layers from its vision tower "
                f"(vision_feature_layer {layer}); pruning needs a single number"
            )
        if config.matching != "max":
            raise ValueError(
                "anchorprune: matching is for models whose words and visual tokens share a space "
                "(Qwen2.5-VL); a CLIP or SigLIP pair compares with the question as a whole: leave "
                "it out"
            )
        vision_config = model_config.hf_config.vision_config
        text_encoder = text_encoder_of(cls.pair_family, vision_config, config)
        if text_encoder is not None:
            cls.pair_family.check_files(text_encoder)

    def _make_signals(self, config: PruneConfig, vllm_config: VllmConfig) -> Signals:
        model_config = vllm_config.model_config
        vision_config = model_config.hf_config.vision_config
        text_encoder = text_encoder_of(self.pair_family, vision_config, config)
        logger.info_once(active_line(config, text_encoder))
        if text_encoder is None:
            return PlainSignals(self._context_of)
        device = vllm_config.device_config.device
        pair = self.pair_family.load(text_encoder, model_config.dtype, device)
        self.anchorprune_text_encoder = _as_buffers(pair)
        return self._signals_of(pair, config.similarity)

    @abstractmethod
    def _signals_of(self, pair: TextPair, similarity: Similarity) -> Signals:
        """Signals in the pair's space."""

    def _context_of(self, rows: Tensor) -> Tensor:
        """The tower's part [N, D] of the rows of an item."""
        return rows

    def _key_shape(self) -> tuple[int, int]:
        vision = self.config.vision_config  # type: ignore[attr-defined]
        return vision.num_attention_heads, vision.hidden_size // vision.num_attention_heads

# SPDX-License-Identifier: Apache-2.0
"""The parts that models share if their vision tower belongs to a CLIP or SigLIP pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size

from anchorprune_vllm.api.processor import PruningProcessor, QueryTokenizer
from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.log import active_line, logger
from anchorprune_vllm.methods.registry import method_of
from anchorprune_vllm.models.linear_positions import LinearPositionsModel
from anchorprune_vllm.signals.contrastive import (
    ContrastiveFamily,
    ContrastivePair,
    ContrastiveRelevance,
)
from anchorprune_vllm.signals.features import MediaFeatures, Relevance
from anchorprune_vllm.worker.tower_taps import SIGNALS, Measure, Where, measured, tapped


def encode_tiles(model: Any, pixel_values: Tensor, importance: Measure) -> MediaFeatures:
    """Run the tower of a LLaVA-like model on tiles [B, 3, H, W].

    Returns the context of all tiles, and the signals of their tokens that the model's method needs
    from the tower's attention, each [B, N, ...].
    """
    layers = model.vision_tower.vision_model.encoder.layers
    # HiPrune finds objects in layer 9 of 24; in other towers, the same relative depth is used.
    middle = layers[model.config.vision_config.num_hidden_layers * 3 // 8]
    attentions: dict[Where, Any] = {
        "last": layers[-1].self_attn.attn,
        "middle": middle.self_attn.attn,
    }
    batch, ranks = len(pixel_values), get_tensor_model_parallel_world_size()
    needed = {name for name in SIGNALS if name in model.needs}
    signals: dict[str, Tensor] = {}

    # Measured at once: kept until the tower is through, queries and keys would add to its peak.
    def measure(module: Any, query: Tensor, key: Tensor) -> None:
        here = {name for name in needed if attentions[SIGNALS[name].where] is module}
        segments = [len(query) // batch] * batch
        signals.update(
            measured(here, attentions, {module: (query, key)}, segments, ranks, importance)
        )

    with tapped({attentions[SIGNALS[name].where] for name in needed}, measure):
        hidden = model._image_pixels_to_features(model.vision_tower, pixel_values)
    # A tower with a [CLS] token, which is the first one, may have dropped it from its output.
    tokens = hidden.shape[1]
    by_tile = {
        name: signal.unflatten(0, (batch, -1))[:, -tokens:] for name, signal in signals.items()
    }
    return MediaFeatures(hidden, **by_tile)


class ContrastivePruningProcessor(PruningProcessor):
    """A mixin that tokenizes questions for the text tower of the pair."""

    contrastive_family: ContrastiveFamily

    def _text_encoder(self) -> str | None:
        vision_config = self.info.get_hf_config().vision_config
        return text_encoder_of(self.contrastive_family, vision_config, self.prune_config)

    def _make_query_tokenizer(self, text_encoder: str | None) -> QueryTokenizer:
        if text_encoder is None:
            return lambda query: torch.empty(0, 0, dtype=torch.int64)
        return self.contrastive_family.query_tokenizer(text_encoder)


def text_encoder_of(
    family: ContrastiveFamily, vision_config: Any, config: PruneConfig
) -> str | None:
    """Return the checkpoint of the text tower, or None if the method does not use the question.

    Raises ValueError if a text tower is needed and cannot be found.
    """
    if "features" not in method_of(config).needs:
        return None
    return family.find(vision_config, config.text_encoder)


def _as_buffers(pair: ContrastivePair) -> nn.Module:
    """Return a module that holds the tensors of a pair as buffers, and loads no weights.

    vLLM's deep sleep drops all memory, but saves and restores the buffers of the model.
    """
    holder = nn.Module()
    for number, tensor in enumerate(pair.tensors()):
        # No checkpoint has these tensors, so vLLM must not wait for them when it reloads weights.
        tensor.weight_loader_numel = 0  # type: ignore[attr-defined]
        holder.register_buffer(str(number), tensor, persistent=False)
    return holder


class ContrastivePrunedModel(LinearPositionsModel):
    """A mixin for models with a pair; list it before the vLLM model that it extends."""

    contrastive_family: ContrastiveFamily
    _pair: ContrastivePair | None = None

    @classmethod
    def fits(cls, hf_config: Any) -> bool:
        return (
            hf_config.vision_config.model_type
            == f"{cls.contrastive_family.model_type}_vision_model"
        )

    @classmethod
    def check(cls, model_config: Any, config: PruneConfig) -> None:
        layer = model_config.hf_config.vision_feature_layer
        if not isinstance(layer, int):
            raise ValueError(
                f"anchorprune: this model takes a list of layers from its vision tower "
                f"(vision_feature_layer {layer}), and pruning needs a single number; leave out "
                "--anchorprune-budget to serve it unpruned"
            )
        if config.matching != "max":
            raise ValueError(
                "anchorprune: matching is for models whose words and visual tokens share a space "
                "(Qwen2.5-VL); a CLIP or SigLIP pair compares with the question as a whole: leave "
                "it out"
            )
        vision_config = model_config.hf_config.vision_config
        text_encoder = text_encoder_of(cls.contrastive_family, vision_config, config)
        if text_encoder is not None:
            cls.contrastive_family.check_files(text_encoder)

    def _make_relevance(self, config: PruneConfig, vllm_config: VllmConfig) -> Relevance | None:
        model_config = vllm_config.model_config
        vision_config = model_config.hf_config.vision_config
        text_encoder = text_encoder_of(self.contrastive_family, vision_config, config)
        logger.info_once(active_line(config, text_encoder))
        if text_encoder is None:
            return None
        device = vllm_config.device_config.device
        self._pair = self.contrastive_family.load(text_encoder, model_config.dtype, device)
        self.anchorprune_text_encoder = _as_buffers(self._pair)
        return ContrastiveRelevance(self._pair, config.similarity)

    def _align(self, hidden: Tensor) -> Tensor | None:
        """Return patches [..., D] in the pair's space [..., P], or None if there is no pair."""
        return None if self._pair is None else self._pair.embed_patches(hidden)

    def _row_widths(self) -> dict[str, int]:
        widths = {"context": self.config.vision_config.hidden_size}  # type: ignore[attr-defined]
        return widths if self._pair is None else {**widths, "aligned": self._pair.width}

    def _key_shape(self) -> tuple[int, int]:
        vision = self.config.vision_config  # type: ignore[attr-defined]
        return vision.num_attention_heads, vision.hidden_size // vision.num_attention_heads

# SPDX-License-Identifier: Apache-2.0
"""What every pruned model adds to vLLM's own class, whatever its architecture.

Without a budget in the HF config, model, processor and processing info are vLLM's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.processing import BaseMultiModalProcessor, InputProcessingContext
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from anchorprune_vllm.compat import check_vllm
from anchorprune_vllm.config import Positions, PruneConfig
from anchorprune_vllm.feature_cache import FeatureCache, Layout
from anchorprune_vllm.methods import Signal, method_of, small_item
from anchorprune_vllm.metrics.selections import selection_metrics
from anchorprune_vllm.plan import PlanFields, pop_plans, read_counts
from anchorprune_vllm.positions import (
    MediaPositions,
    MediaSpan,
    place_media,
    prompt_positions,
    with_positions,
)
from anchorprune_vllm.processor import PruningProcessor, refuse_overrides
from anchorprune_vllm.pruner import PrunableModel, Signals, VisualPruner

_Model = TypeVar("_Model", bound=type)


def prunes_with(processor: type[PruningProcessor], info: type[Any]) -> Callable[[_Model], _Model]:
    """Decorate a model: these with a budget, and without one what its parent has from vLLM."""

    def decorate(model: _Model) -> _Model:
        plain = model._processor_factory  # type: ignore[attr-defined]

        def make_info(ctx: InputProcessingContext) -> Any:
            is_on = PruneConfig.of_model(ctx.get_hf_config()) is not None
            return (info if is_on else plain.info)(ctx)

        def make_processor(made_info: Any, dummy_inputs: Any) -> BaseMultiModalProcessor:
            if PruneConfig.of_model(made_info.get_hf_config()) is not None:
                return processor(made_info, dummy_inputs)
            return refuse_overrides(plain.processor(made_info, dummy_inputs))

        register = MULTIMODAL_REGISTRY.register_processor(
            make_processor, info=make_info, dummy_inputs=plain.dummy_inputs
        )
        return register(model)

    return decorate


class LargestItemInfo:
    """Mixin over a vLLM processing info: tells the largest item that a request may ask for."""

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        info: Any = self
        largest = {"image": info.get_max_image_tokens()}
        if "video" in info.supported_mm_limits:
            largest["video"] = info.get_max_video_tokens(seq_len, mm_counts)
        return largest


class PrunedModel:
    """Mixin: list it before the vLLM model that it extends.

    With native positions the model goes vLLM's way for M-RoPE models that prune (its interfaces
    `SupportsMRoPE` and `SupportsMultiModalPruning`).
    """

    modalities: tuple[str, ...] = ("image",)
    default_positions: Positions = "compact"
    supports_mrope = True  # asked only where the config says that the model uses it

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        model_config = vllm_config.model_config
        config = PruneConfig.of_model(model_config.hf_config)
        self._pruner: VisualPruner | None = None
        self._native_positions = False
        self.needs: frozenset[Signal] = frozenset()
        if config is None:
            return
        native = config.has_native_positions(self.default_positions)
        check_vllm(type(self), native=native)  # as at start-up, if vLLM let us look at it then
        method = method_of(config)
        self.needs = method.needs
        if native:
            _check_speculation(vllm_config)
            self._native_positions = self.supports_multimodal_pruning = True
            self.is_multimodal_pruning_enabled = False  # vLLM's own, which appends channels as well
            # vLLM's runners ask this after loading; by itself it knows of its own pruning alone.
            model_config.multimodal_config.is_multimodal_pruning_enabled = _yes
        self._max_model_len = model_config.max_model_len
        self._max_encoder_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        limit = model_config.multimodal_config.get_limit_per_prompt
        if any(limit(name) > 0 for name in self.modalities) and get_pp_group().is_first_rank:
            self._pruner = VisualPruner(
                signals=self._make_signals(config, vllm_config),
                method=method,
                cache=FeatureCache(
                    config.feature_cache_mb * 2**20,
                    self._cache_page(),
                    self._feature_layout(model_config.dtype),
                    vllm_config.device_config.device,
                ),
                max_encoder_tokens=self._max_encoder_tokens,
                metrics=selection_metrics(vllm_config, config),
            )
            # Selection is compiled on first use: now, and not while a request waits.
            method.select([small_item(vllm_config.device_config.device)])

    @classmethod
    def prepare(cls, model_config: Any) -> None:
        """What the model needs at start-up, pruned or not; raises ValueError if it has it not."""

    @classmethod
    @abstractmethod
    def check(cls, model_config: Any, config: PruneConfig) -> None:
        """Raise ValueError, before anything is loaded, if this checkpoint cannot be pruned."""

    @classmethod
    def use_native_positions(cls, hf_config: Any) -> None:
        """Make vLLM keep positions per request, as it does for M-RoPE models."""

    @abstractmethod
    def _make_signals(self, config: PruneConfig, vllm_config: VllmConfig) -> Signals:
        """What the model's tokens are ranked by; logs that pruning is active."""

    @abstractmethod
    def _cache_page(self) -> int:
        """Tokens of a page of the feature cache: a small image."""

    @abstractmethod
    def _hidden_size(self) -> int:
        """Of a token in the feature cache."""

    @abstractmethod
    def _key_shape(self) -> tuple[int, int]:
        """Heads of the vision tower's attention, and size of a head."""

    def _feature_layout(self, dtype: torch.dtype) -> Layout:
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "hidden": ((self._hidden_size(),), dtype)
        }
        if "importance" in self.needs:
            layout["importance"] = ((), torch.float32)
        if "keys" in self.needs:
            layout["keys"] = (self._key_shape(), dtype)
        if "object_attention" in self.needs:
            layout["object_attention"] = ((), torch.float32)
        return layout

    @abstractmethod
    def _media(self, modality: str, kwargs: dict[str, Any]) -> PrunableModel:
        """One call's items of a modality, as the pruner asks for them."""

    @abstractmethod
    def _media_token_ids(self) -> list[int]:
        """Ids of the placeholders."""

    def _extent(self, feature: MultiModalFeatureSpec) -> int:
        """Positions that an item of a request takes unpruned."""
        counts = feature.data.get(PlanFields.of(feature.modality).counts)
        if counts is None:  # the client's own embeddings
            return feature.mm_position.length
        return read_counts(counts.data)[1].unpruned

    def _given_positions(self, embeddings: Sequence[Tensor], **kwargs: Any) -> list[MediaPositions]:
        """Of items that the pruner has not seen."""
        return [MediaPositions.in_line(len(rows)) for rows in embeddings]

    def embed_multimodal(self, **kwargs: Any) -> Sequence[Tensor]:
        if self._pruner is not None:
            for modality in self.modalities:  # vLLM batches items of one modality at a time
                plans = pop_plans(modality, kwargs)
                if plans is not None:
                    return self._pruner.embed(self._media(modality, kwargs), plans)
        embeddings = super().embed_multimodal(**kwargs)  # type: ignore[misc]
        if self._native_positions:  # the client's own embeddings, or vLLM's way
            positions = self._given_positions(embeddings, **kwargs)
            return [with_positions(*item) for item in zip(embeddings, positions, strict=True)]
        return embeddings

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if self._pruner is not None:
            self._pruner.forget_media()
        return super().load_weights(weights)  # type: ignore[misc]

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        if not self._native_positions:
            return super().get_mrope_input_positions(input_tokens, mm_features)  # type: ignore[misc]
        spans = [
            MediaSpan(item.mm_position.offset, item.mm_position.length, self._extent(item))
            for item in mm_features
        ]
        return prompt_positions(len(input_tokens), spans)

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | Tensor,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[Tensor], Tensor, int]:
        if not self._native_positions:
            return super().recompute_mrope_positions(  # type: ignore[misc]
                input_ids, multimodal_embeddings, mrope_positions, num_computed_tokens
            )
        with gpu_sync_allowed():  # as vLLM: positions are kept where the host reads them
            return place_media(
                input_ids,
                self._media_token_ids(),
                multimodal_embeddings,
                mrope_positions,
                num_computed_tokens,
            )


def mean_over_heads(summed: Tensor, attention: Any, heads: int) -> Tensor:
    """Importance from its sum over the heads that an attention module of this rank has."""
    if attention.num_heads != heads:
        # Heads are split over tensor-parallel ranks; every rank must see the same sum.
        summed = tensor_model_parallel_all_reduce(summed)
    return summed / heads


def keys_of_all_heads(keys: Tensor, attention: Any, heads: int) -> Tensor:
    """Keys [..., heads, head size] from those of the heads that this rank has."""
    return keys if attention.num_heads == heads else tensor_model_parallel_all_gather(keys, dim=-2)


def _check_speculation(vllm_config: VllmConfig) -> None:
    """Refuse what the first model runner alone cannot do.

    Only now is it known which runner vLLM takes, and how it schedules. The first one corrects
    positions on the device once it knows which drafts were right, and for pruned models it then
    overwrites them with uncorrected ones.
    """
    is_asynchronous = vllm_config.scheduler_config.async_scheduling
    # A vLLM without this property has one runner left, the second.
    if getattr(vllm_config, "use_v2_model_runner", True) or not is_asynchronous:
        return
    if vllm_config.speculative_config is not None:
        raise ValueError(
            "anchorprune: on vLLM's first model runner, native positions cannot be combined with "
            "speculative decoding under asynchronous scheduling; give --no-async-scheduling, or "
            "let vLLM use its second one (VLLM_USE_V2_MODEL_RUNNER=1)"
        )


def _yes() -> bool:
    return True

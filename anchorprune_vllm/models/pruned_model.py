# SPDX-License-Identifier: Apache-2.0
"""What every pruned model adds to vLLM's own class, whatever its architecture.

Without a budget in the HF config, the model, its processor and its processing info are vLLM's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.processing import BaseMultiModalProcessor, InputProcessingContext
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.utils.torch_utils import set_default_torch_dtype

from anchorprune_vllm.api.processor import PruningProcessor
from anchorprune_vllm.api.requests import refuse_overrides
from anchorprune_vllm.config import Positions, PruneConfig
from anchorprune_vllm.media_tokens import EMBEDDED, media_token_ids
from anchorprune_vllm.methods.registry import Signal, method_of, probe_item
from anchorprune_vllm.metrics.selections import selection_metrics
from anchorprune_vllm.plan import ItemPlan, PlanFields, pop_plans, read_counts
from anchorprune_vllm.signals.features import Relevance
from anchorprune_vllm.vllm_patches import check_vllm
from anchorprune_vllm.worker.feature_cache import FeatureCache, Layout
from anchorprune_vllm.worker.positions import (
    MediaPositions,
    MediaSpan,
    answer_delta,
    place_media,
    prompt_positions,
    with_positions,
)
from anchorprune_vllm.worker.pruner import MediaBatch, VisualPruner
from anchorprune_vllm.worker.tower_taps import SIGNALS
from anchorprune_vllm.worker.warm_up import warm_up_without_profiling

_Model = TypeVar("_Model", bound=type)


def prunes_with(processor: type[PruningProcessor], info: type[Any]) -> Callable[[_Model], _Model]:
    """Return a decorator that gives a model a processor and processing info for pruning.

    Without a budget in its config, the model keeps those that its parent has from vLLM.
    """

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


class UnprunedLimits:
    """A mixin over a vLLM processing info that reports the size of the largest unpruned item."""

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        info: Any = self
        largest = {"image": info.get_max_image_tokens()}
        if "video" in info.supported_mm_limits:
            largest["video"] = info.get_max_video_tokens(seq_len, mm_counts)
        return largest


class PrunedModel:
    """A mixin that prunes; list it before the vLLM model that it extends.

    With native positions, the model uses vLLM's interfaces for M-RoPE models that prune
    (`SupportsMRoPE` and `SupportsMultiModalPruning`).
    """

    modalities: tuple[str, ...] = ("image",)
    default_positions: Positions = "compact"
    supports_mrope = True  # vLLM reads this only if the config says that the model uses M-RoPE

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        model_config = vllm_config.model_config
        config = PruneConfig.of_model(model_config.hf_config)
        native = config is not None and config.has_native_positions(self.default_positions)
        if native:
            # vLLM only knows its own pruning. Its layers call this method while they are made,
            # because positions may exceed the length of a pruned prompt; its runners call it later.
            model_config.multimodal_config.is_multimodal_pruning_enabled = _yes
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self._pruner: VisualPruner | None = None
        self._native_positions = False
        self.needs: frozenset[Signal] = frozenset()
        if config is None:
            return
        check_vllm(type(self), native=native)  # start-up may not have had the chance to check
        method = method_of(config)
        self.needs = method.needs
        self._budgets = {modality: config.budget_for(modality) for modality in self.modalities}
        if native:
            _check_speculation(vllm_config)
            self._native_positions = self.supports_multimodal_pruning = True
            self.is_multimodal_pruning_enabled = False  # vLLM's own pruning would append channels
            self.get_model_state_cls = _native_positions_state  # only its second runner calls this
        self._media_token_ids = [*media_token_ids(model_config.hf_config, EMBEDDED).values()]
        self.embedding_size = model_config.get_inputs_embeds_size()
        self._max_model_len = model_config.max_model_len
        self._max_encoder_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        limit = model_config.multimodal_config.get_limit_per_prompt
        if any(limit(name) > 0 for name in self.modalities) and get_pp_group().is_first_rank:
            self._pruner = VisualPruner(
                relevance=self._make_relevance(config, vllm_config),
                method=method,
                cache=FeatureCache(
                    config.feature_cache_mb * 2**20,
                    self._cache_page(),
                    self._feature_layout(model_config.dtype),
                    vllm_config.device_config.device,
                ),
                max_encoder_tokens=self._max_encoder_tokens,
                embedding_size=self.embedding_size,
                metrics=selection_metrics(vllm_config, config),
                embed_text=self.embed_text,
            )
            # Everything is compiled before a request waits for it: selection now, in the state that
            # torch has during a request, and the whole path as soon as there are weights.
            with torch.device("cpu"), set_default_torch_dtype(torch.float32):
                method.select([probe_item(vllm_config.device_config.device)])
            warm_up_without_profiling(self._pruner, self.embed_multimodal, vllm_config)

    @classmethod
    def fits(cls, hf_config: Any) -> bool:
        """Return whether this adapter is made for a checkpoint.

        If not, the general adapter prunes it, provided that vLLM has the model itself.
        """
        return True

    @classmethod
    def prepare(cls, model_config: Any) -> None:
        """Set up what the model needs at start-up, pruned or not.

        Raises ValueError if the checkpoint cannot be served.
        """

    @classmethod
    @abstractmethod
    def check(cls, model_config: Any, config: PruneConfig) -> None:
        """Raise ValueError, before anything is loaded, if this checkpoint cannot be pruned."""

    @classmethod
    def use_native_positions(cls, hf_config: Any) -> None:
        """Make vLLM keep positions per request, as it does for M-RoPE models."""

    @abstractmethod
    def _make_relevance(self, config: PruneConfig, vllm_config: VllmConfig) -> Relevance | None:
        """Return what compares tokens with questions, and log that pruning is active.

        Returns None if the method does not compare them.
        """

    @abstractmethod
    def _cache_page(self) -> int:
        """Return the tokens per page of the feature cache, about those of a small image."""

    @abstractmethod
    def _row_widths(self) -> dict[str, int]:
        """Return the width of each `MediaFeatures` field that the feature cache stores."""

    @abstractmethod
    def _key_shape(self) -> tuple[int, int]:
        """Return the number of heads of the vision tower's attention, and the size of a head."""

    def _feature_layout(self, dtype: torch.dtype) -> Layout:
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: ((width,), dtype) for name, width in self._row_widths().items()
        }
        for name, spec in SIGNALS.items():
            if name in self.needs:
                layout[name] = spec.layout(self._key_shape(), dtype)
        return layout

    @abstractmethod
    def _media(
        self, modality: str, kwargs: dict[str, Any], plans: Sequence[ItemPlan]
    ) -> MediaBatch:
        """Return the items of one call, in the form that the pruner expects."""

    def embed_text(self, ids: Tensor) -> Tensor:
        """Return the language model's embeddings [M, H] of tokens [M]."""
        model: Any = self
        return model.get_language_model().embed_input_ids(ids)

    def _span(self, feature: MultiModalFeatureSpec) -> MediaSpan:
        """Return the place of an item in its prompt."""
        place = feature.mm_position
        return MediaSpan(place.offset, place.length, self._extent(feature))

    def _extent(self, feature: MultiModalFeatureSpec) -> int:
        """Return the number of positions that an item takes unpruned."""
        counts = feature.data.get(PlanFields.of(feature.modality).counts)
        if counts is None:  # the client's own embeddings
            return feature.mm_position.length
        return read_counts(counts.data)[1].unpruned

    def _given_positions(self, embeddings: Sequence[Tensor], **kwargs: Any) -> list[MediaPositions]:
        """Return the positions of items that the pruner has not seen."""
        return [MediaPositions.in_line(len(rows)) for rows in embeddings]

    def embed_multimodal(self, **kwargs: Any) -> Sequence[Tensor]:
        if self._pruner is not None:
            for modality in self.modalities:  # a call has items of one modality
                plans = pop_plans(modality, kwargs)
                if plans is not None:
                    media = self._media(modality, kwargs, plans)
                    if plans[0].is_dummy:
                        return self._pruner.warm_up(media, plans, self._budgets[modality])
                    return self._pruner.embed(media, plans)
        embeddings = super().embed_multimodal(**kwargs)  # type: ignore[misc]
        if self._native_positions:  # these are the client's own embeddings, or vLLM's path
            positions = self._given_positions(embeddings, **kwargs)
            return [with_positions(*item) for item in zip(embeddings, positions, strict=True)]
        return embeddings

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.reset_encoder_cache()
        return super().load_weights(weights)  # type: ignore[misc]

    def reset_encoder_cache(self) -> None:
        """Drop all cached media; vLLM's runners call this when they empty their encoder cache."""
        if self._pruner is not None:
            self._pruner.forget_media()

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        if not self._native_positions:
            return super().get_mrope_input_positions(input_tokens, mm_features)  # type: ignore[misc]
        spans = [self._span(item) for item in mm_features]
        positions, delta = prompt_positions(len(input_tokens), spans)
        # vLLM has no room for the answer's position if the prompt fills the whole context.
        return positions[:, : self._max_model_len], delta

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | Tensor,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[Tensor], Tensor, int | None]:
        if not self._native_positions:
            return super().recompute_mrope_positions(  # type: ignore[misc]
                input_ids, multimodal_embeddings, mrope_positions, num_computed_tokens
            )
        # vLLM's second runner has everything on the device, and `model_state.py` keeps its deltas.
        keeps_delta = isinstance(input_ids, Tensor)
        # The first runner waits once for each request with media in a step: it has positions on
        # the host, while those of kept tokens come from the device.
        with nullcontext() if keeps_delta else gpu_sync_allowed():
            rows = place_media(
                input_ids,
                self._media_token_ids,
                multimodal_embeddings,
                mrope_positions,
                num_computed_tokens,
            )
        delta = None if keeps_delta else answer_delta(mrope_positions, len(input_ids))
        return rows, mrope_positions, delta


def _check_speculation(vllm_config: VllmConfig) -> None:
    """Raise ValueError for speculative decoding that vLLM's first model runner cannot do.

    Which runner vLLM uses, and how it schedules, is not known earlier than this. The first runner
    corrects positions on the device once it knows which drafts were right, but for pruned models it
    then overwrites them with uncorrected ones.
    """
    is_asynchronous = vllm_config.scheduler_config.async_scheduling
    # A vLLM without this property has only the second runner left.
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


def _native_positions_state() -> type[Any]:
    # Imported here, because the first runner needs nothing of the second.
    from anchorprune_vllm.worker.model_state import NativePositionsState

    return NativePositionsState

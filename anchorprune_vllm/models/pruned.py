# SPDX-License-Identifier: Apache-2.0
"""What every pruned model adds to vLLM's own class, whatever its architecture.

Without a budget in the HF config, model, processor and processing info are vLLM's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseMultiModalProcessor, InputProcessingContext

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.plan import pop_plans
from anchorprune_vllm.processor import PruningProcessor, refuse_overrides
from anchorprune_vllm.pruner import PrunableModel, VisualPruner

_Model = TypeVar("_Model", bound=type)


def prunes_with(processor: type[PruningProcessor], info: type[Any]) -> Callable[[_Model], _Model]:
    """Decorate a model: these with a budget, and without one what its parent has from vLLM."""

    def decorate(model: _Model) -> _Model:
        plain = model._processor_factory  # type: ignore[attr-defined]

        def make_info(ctx: InputProcessingContext) -> Any:
            is_on = PruneConfig.of_model(ctx.get_hf_config()) is not None
            return (info if is_on else plain.info)(ctx)

        def make_processor(made_info: Any, dummy_inputs: Any) -> BaseMultiModalProcessor:
            if isinstance(made_info, info):
                return processor(made_info, dummy_inputs)
            return refuse_overrides(plain.processor(made_info, dummy_inputs))

        register = MULTIMODAL_REGISTRY.register_processor(
            make_processor, info=make_info, dummy_inputs=plain.dummy_inputs
        )
        return register(model)

    return decorate


class UnprunedInfo:
    """Mixin over a vLLM processing info: tells the largest item that a request may ask for."""

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        return {"image": self.get_max_image_tokens()}  # type: ignore[attr-defined]


class PrunedModel:
    """Mixin: list it before the vLLM model that it extends."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        model_config = vllm_config.model_config
        config = PruneConfig.of_model(model_config.hf_config)
        has_images = model_config.multimodal_config.get_limit_per_prompt("image") > 0
        self._pruner: VisualPruner | None = None
        if config is not None and has_images and get_pp_group().is_first_rank:
            self._pruner = self._make_pruner(config, vllm_config)

    @classmethod
    @abstractmethod
    def check(cls, hf_config: Any, config: PruneConfig) -> None:
        """Raise ValueError, before anything is loaded, if this checkpoint cannot be pruned."""

    @abstractmethod
    def _make_pruner(self, config: PruneConfig, vllm_config: VllmConfig) -> VisualPruner:
        """The pruner with this model's signals."""

    @abstractmethod
    def _images(self, **kwargs: Any) -> PrunableModel:
        """One call's images, as the pruner asks for them."""

    def embed_multimodal(self, **kwargs: Any) -> Sequence[Tensor]:
        plans = pop_plans("image", kwargs)
        if plans is None or self._pruner is None:
            return super().embed_multimodal(**kwargs)  # type: ignore[misc]
        return self._pruner.embed(self._images(**kwargs), plans)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if self._pruner is not None:
            self._pruner.forget_media()
        return super().load_weights(weights)  # type: ignore[misc]

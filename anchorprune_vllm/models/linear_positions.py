# SPDX-License-Identifier: Apache-2.0
"""Native positions for language models with ordinary, 1-D rotary embeddings (the LLaVAs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from anchorprune_vllm.models.pruned_model import PrunedModel
from anchorprune_vllm.plan import ItemPlan
from anchorprune_vllm.worker.positions import CHANNELS, MediaPositions

_EQUAL_CHANNELS = [1] * CHANNELS
"""An `mrope_section` that no model with M-RoPE has, so it marks those without."""


def has_positions_in_channels(hf_config: Any) -> bool:
    """Return whether `use_native_positions` has made a config look like that of an M-RoPE model."""
    return getattr(hf_config, "mrope_section", None) == _EQUAL_CHANNELS


class LinearPositionsModel(PrunedModel):
    """A mixin for 1-D positions: vLLM keeps equal channels, and the language model gets one."""

    @classmethod
    def use_native_positions(cls, hf_config: Any) -> None:
        # Only the config of the whole model is changed: that of the language model keeps ordinary
        # rotary embeddings.
        hf_config.mrope_section = [*_EQUAL_CHANNELS]

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._native_positions:
            # There are no positions after the language model's last one. Clamping is in place,
            # because CUDA graphs read positions from the buffer in which they were captured.
            positions = positions[0].clamp_(max=self._last_position())
        return super().forward(  # type: ignore[misc]
            input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
        )

    def linear_positions(
        self, plan: ItemPlan, unpruned_index: Callable[[], Tensor]
    ) -> MediaPositions | None:
        """Return the native positions of an item, or None if positions are compact.

        `unpruned_index` returns the indices [N] of its candidates among its unpruned tokens.
        """
        if not self._native_positions:
            return None
        if plan.keeps_all:
            return MediaPositions.in_line(plan.tokens.unpruned)
        return MediaPositions.at(unpruned_index())

    def _last_position(self) -> int:
        """Return the last position of the rotary embeddings.

        A context that is scaled at start-up is longer than the config says.
        """
        text_config = self.config.get_text_config()  # type: ignore[attr-defined]
        return max(text_config.max_position_embeddings, self._max_model_len) - 1

# SPDX-License-Identifier: Apache-2.0
"""Limits on the size of images and videos, so that none needs more memory than there is.

vLLM's own limits apply to the tokens that are left after pruning, so any size would pass them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.media_tokens import MODALITIES
from anchorprune_vllm.methods.registry import method_of
from anchorprune_vllm.plan import ItemPlan

_TIMES_THE_LARGEST = 4
"""A video may have this many times the tokens of the largest item that vLLM has profiled: the
vision tower sees some of its frames at a time, but selection sees all of them."""


@dataclass(frozen=True)
class SizeLimits:
    """The largest sizes of items that are pruned, in visual tokens."""

    largest: int
    """The size of the largest item that vLLM has set memory aside for."""
    method: str
    of_method: int | None
    """The largest item that the method accepts, or None if it accepts any size."""

    @classmethod
    def of(cls, processor: Any, config: PruneConfig) -> SizeLimits:
        """Return the limits for the model that a vLLM processor belongs to."""
        info = processor.info
        # vLLM sets no memory aside for a modality that `--limit-mm-per-prompt` excludes.
        limits = info.allowed_mm_limits
        counts = {name: 1 for name in MODALITIES if limits.get(name, 0) > 0}
        largest = info.get_mm_max_tokens_per_item(info.ctx.model_config.max_model_len, counts)
        if largest is None:  # vLLM then assumes that its dummy items are the largest
            dummies = processor.get_dummy_mm_inputs(counts)["mm_placeholders"]
            largest = {name: dummies[name][0].get_num_embeds() for name in counts}
        return cls(
            max(largest[name] for name in counts), config.method, method_of(config).most_tokens
        )

    def check(self, modality: str, plan: ItemPlan) -> None:
        """Raise ValueError if a pruned item is too large."""
        tokens, largest_unit = plan.tokens.candidates, max(plan.tokens.unit_sizes)
        if self.of_method is not None and tokens > self.of_method:
            raise ValueError(
                f"anchorprune: this {modality} has {tokens} visual tokens, and the method "
                f"{self.method} takes at most {self.of_method}; send a smaller one"
            )
        frame, remedy = "frame", "send fewer frames, or smaller ones"
        if modality == "image":
            frame, remedy = "tile", "send it smaller"
        if tokens > (most := _TIMES_THE_LARGEST * self.largest):
            raise ValueError(
                f"anchorprune: this {modality} has {tokens} visual tokens before pruning; at most "
                f"{most} are allowed, four times the largest item that memory was set aside for: "
                f"{remedy}"
            )
        if largest_unit > self.largest:
            raise ValueError(
                f"anchorprune: this {modality} has {largest_unit} visual tokens in one {frame} "
                f"before pruning; at most {self.largest} are allowed, the largest item that memory "
                "was set aside for: send it smaller"
            )

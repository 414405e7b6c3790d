# SPDX-License-Identifier: Apache-2.0
"""The placeholders of an image or video in the prompt: K of them instead of N."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.processing import PromptReplacement, PromptUpdateDetails

from anchorprune_vllm.plan import PlanFields, read_counts


@dataclass
class CountedDetails(PromptUpdateDetails):
    """Placeholders that know how many there would be unpruned.

    vLLM's cache of processed items keeps them, where an item's plan may be gone to the engine.
    """

    unpruned: int = 0


def shortened(update: PromptReplacement, out_mm_kwargs: MultiModalKwargsItems) -> Any:
    """The same update with K placeholders for each pruned item, `CountedDetails` for all."""
    counts_field = PlanFields.of(update.modality).counts

    def replacement(item_idx: int) -> PromptUpdateDetails:
        content = update.replacement
        if callable(content):
            content = content(item_idx)
        if not isinstance(content, PromptUpdateDetails):
            content = PromptUpdateDetails.from_seq(content)
        kept, tokens = read_counts(out_mm_kwargs[update.modality][item_idx][counts_field].data)
        if len(content.full) != tokens.unpruned:
            # Rather than fewer or more placeholders than embeddings, which ends the engine.
            raise ValueError(
                f"anchorprune: vLLM and the model's own processor take this {update.modality} for "
                f"one of {len(content.full)} and of {tokens.unpruned} tokens; give it as a PIL "
                "image, or as an array [height, width, 3]"
            )
        full = content.full if tokens.are_all_kept(kept) else content.full[:kept]
        return CountedDetails(full=full, is_embed=content.is_embed, unpruned=tokens.unpruned)

    return replace(update, replacement=replacement)

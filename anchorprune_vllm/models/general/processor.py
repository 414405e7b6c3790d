# SPDX-License-Identifier: Apache-2.0
"""The processor of the general adapter, made over any processor of vLLM's."""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm.multimodal.inputs import MultiModalKwargsItem

from anchorprune_vllm.api.processor import PruningProcessor
from anchorprune_vllm.config import Positions
from anchorprune_vllm.media_tokens import MODALITIES
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout


class GeneralProcessor(PruningProcessor):
    """A mixin over any vLLM processor, for prompts with K placeholders per image or video."""

    family: type[Any]

    def __init__(self, info: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(info, *args, **kwargs)
        if not {*MODALITIES} & {*info.supported_mm_limits}:
            raise ValueError(
                f"anchorprune: {info.ctx.model_config.architecture} takes "
                f"{', '.join(info.supported_mm_limits)}, and neither images nor videos by these "
                "names, so nothing of it would be pruned; leave out --anchorprune-budget"
            )

    @property
    def video_margin(self) -> int | None:
        return self.family.video_margin

    def _targets(self) -> dict[str, list[int]]:
        return {
            modality: self.family.target(self.info, modality, replaced)
            for modality, replaced in super()._targets().items()
        }

    def _count_tokens(
        self, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        tokens = self.family.units(self.info.get_hf_config(), modality, item, layout)
        chosen = self.family.candidates(tokens)
        found = tokens.unpruned if chosen is None else len(chosen)
        if tokens.candidates != found:  # passing this on would end the engine
            raise ValueError(
                f"anchorprune: the units of this {modality} have {tokens.candidates} candidates, "
                f"and {found} are found among its tokens, so it cannot be pruned; send it with a "
                f"budget of 100%, or send another {modality}"
            )
        return tokens


@cache
def pruning_processor(
    processor: type, family: Any, default_positions: Positions
) -> type[GeneralProcessor]:
    """Return the class that adds pruning to a processor of vLLM."""
    name = f"Pruning{processor.__name__}"
    own = {"family": family, "default_positions": default_positions}
    return type(name, (GeneralProcessor, processor), own)

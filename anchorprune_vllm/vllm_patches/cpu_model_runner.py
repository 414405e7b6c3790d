# SPDX-License-Identifier: Apache-2.0
"""Make vLLM's CPU model runner read the positions of pruned models as its GPU runners do."""

from __future__ import annotations

import functools
from typing import Any


def wrap_load_model(original: Any) -> Any:
    """Wrap `load_model` to check whether a model's embeddings carry positions, and to warm it up.

    vLLM's GPU runners profile a model before it is ready; this runner does so only if it compiles.
    """

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.model_executor.models.interfaces import supports_multimodal_pruning

        from anchorprune_vllm.worker.warm_up import warm_up_now

        original(self, *args, **kwargs)
        if getattr(self.get_model(), "must_learn_first", False):
            warm_up_now(self.get_model(), self.vllm_config)
        multimodal_config = self.model_config.multimodal_config
        self.is_multimodal_pruning_enabled = (
            supports_multimodal_pruning(self.get_model())
            and multimodal_config is not None
            and multimodal_config.is_multimodal_pruning_enabled()
        )

    return load_model

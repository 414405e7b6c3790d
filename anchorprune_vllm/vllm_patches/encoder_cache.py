# SPDX-License-Identifier: Apache-2.0
"""vLLM's encoder cache: when it is emptied, what a model keeps of its encoder goes as well."""

from __future__ import annotations

import functools
from typing import Any


def wrap_initialize_from_config(original: Any) -> Any:
    """Once a worker is ready, tie the model's own cache to the encoder cache of its runner."""

    @functools.wraps(original)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        tie_caches(getattr(self.worker, "model_runner", None))

    return initialize_from_config


def tie_caches(runner: Any) -> None:
    """Both runners empty their cache in one method, called for new weights, pauses and sleep.

    Called in every worker, whatever it serves: one that has no such runner is left alone.
    """
    model = getattr(runner, "get_model", lambda: None)()
    reset_model = getattr(model, "reset_encoder_cache", None)
    reset_runner = getattr(runner, "reset_encoder_cache", None)
    if reset_model is None or reset_runner is None:
        return

    def reset_encoder_cache() -> None:
        reset_runner()
        reset_model()

    runner.reset_encoder_cache = reset_encoder_cache

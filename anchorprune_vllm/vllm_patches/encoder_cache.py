# SPDX-License-Identifier: Apache-2.0
"""Empty a model's own cache of encoder outputs together with vLLM's encoder cache."""

from __future__ import annotations

import functools
from typing import Any


def wrap_initialize_from_config(original: Any) -> Any:
    """Wrap `initialize_from_config` to tie the model's cache to the encoder cache of its runner."""

    @functools.wraps(original)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        tie_caches(getattr(self.worker, "model_runner", None))

    return initialize_from_config


def tie_caches(runner: Any) -> None:
    """Make a runner empty the cache of its model whenever it empties its own.

    Both runners do so in one method, which vLLM calls for new weights, pauses and sleep. This
    function is called in every worker, and does nothing if there is no such runner or cache.
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

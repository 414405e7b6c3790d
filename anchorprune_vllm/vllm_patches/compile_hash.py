# SPDX-License-Identifier: Apache-2.0
"""Keep settings that change no compiled code out of the hash by which vLLM finds that code.

vLLM finds compiled code by a hash of the model's config. Our settings are on that config, and most
of them, such as the budget, change nothing that is compiled. Without this module, vLLM would
compile the language model again for each new budget.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from anchorprune_vllm.config import CONFIG_KEY

_HASHED = ("method", "text_encoder", "feature_cache_mb", "positions")
"""The settings that stay in the hash: vLLM also finds measured memory by it, and these settings
determine what is loaded."""


def leave_out_of_hash(model_config: Any) -> None:
    """Make a model config leave settings that change nothing in the worker out of its hash."""
    model_config.compute_hash = partial(_compute_hash, model_config)


def _compute_hash(model_config: Any) -> str:
    hashed = copy.copy(model_config)
    del hashed.compute_hash
    for name in ("hf_config", "hf_text_config"):
        setattr(hashed, name, _without_settings(getattr(model_config, name)))
    return hashed.compute_hash()


def _without_settings(hf_config: Any) -> Any:
    settings = getattr(hf_config, CONFIG_KEY, None)
    if settings is None:
        return hf_config
    hashed = copy.copy(hf_config)
    setattr(hashed, CONFIG_KEY, {name: settings[name] for name in _HASHED if name in settings})
    return hashed

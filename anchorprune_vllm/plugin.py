# SPDX-License-Identifier: Apache-2.0
"""The plugin that vLLM loads in each of its processes: it registers models and applies patches."""

from __future__ import annotations

from anchorprune_vllm.log import logger
from anchorprune_vllm.models import register_models
from anchorprune_vllm.vllm_patches import apply_patches
from anchorprune_vllm.vllm_patches.hooks import HookGone


def register_plugin() -> None:
    """Register our models in place of vLLM's, and add our flags; safe to call again.

    A server without a budget must always start. So if this vLLM lacks something, there is a warning
    here, and an error only if there is a budget (`startup.py`).
    """
    for step in (register_models, _register_llava_video, apply_patches):
        try:
            step()
        except (HookGone, ImportError, AttributeError, TypeError) as error:
            logger.warning_once("anchorprune: not all of the plugin is in place (%s)", str(error))


def _register_llava_video() -> None:
    """Register LLaVA-Video's config, tokenizer and chat template, which vLLM does not have."""
    from transformers import AutoConfig
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.transformers_utils.chat_templates import registry as chat_templates

    from anchorprune_vllm.models.llava import llava_video_config
    from anchorprune_vllm.models.llava.llava_video_config import (
        CHAT_TEMPLATE,
        MODEL_TYPE,
        LlavaVideoConfig,
    )

    AutoConfig.register(MODEL_TYPE, LlavaVideoConfig, exist_ok=True)
    if MODEL_TYPE not in TokenizerRegistry.tokenizers:
        module = llava_video_config.__name__
        TokenizerRegistry.register(MODEL_TYPE, module, "LlavaVideoTokenizer")
        RENDERER_REGISTRY.register(MODEL_TYPE, "vllm.renderers.hf", "HfRenderer")
        chat_templates.register_chat_template_fallback_path(MODEL_TYPE, CHAT_TEMPLATE)

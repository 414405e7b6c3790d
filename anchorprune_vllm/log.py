# SPDX-License-Identifier: Apache-2.0
"""Log lines, through vLLM's own logging."""

from vllm.logger import init_logger

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.methods.registry import method_of

# Below "vllm": that is the only logger vLLM gives a handler.
logger = init_logger("vllm.anchorprune")


def active_line(config: PruneConfig, text_encoder: str | None) -> str:
    """Say what is active. Processor and model log it, each in its own process, with one truth."""
    video = "" if config.video_budget is None else f", {config.video_budget} per video"
    is_used = "features" in method_of(config).needs  # else nothing is compared with words
    return (
        f"AnchorPrune is active: method {config.method} keeps {config.budget} visual tokens per "
        f"item{video}, query scope {config.query}, text encoder "
        f"{text_encoder if is_used else 'none'}"
    )

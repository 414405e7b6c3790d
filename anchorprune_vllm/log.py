# SPDX-License-Identifier: Apache-2.0
"""The logger of the plugin, which uses vLLM's logging, and a log line that two processes share."""

from vllm.logger import init_logger

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.methods.registry import method_of

# The name is below "vllm", because only that logger has a handler.
logger = init_logger("vllm.anchorprune")


def active_line(config: PruneConfig, text_encoder: str | None) -> str:
    """Return the line that says what is active, which processor and model both log."""
    video = "" if config.video_budget is None else f", {config.video_budget} per video"
    is_used = "features" in method_of(config).needs  # otherwise nothing is compared with words
    return (
        f"AnchorPrune is active: method {config.method} keeps {config.budget} visual tokens per "
        f"item{video}, query scope {config.query}, text encoder "
        f"{text_encoder if is_used else 'none'}"
    )

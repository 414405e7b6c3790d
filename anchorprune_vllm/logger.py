# SPDX-License-Identifier: Apache-2.0
"""Log lines, through vLLM's own logging."""

from vllm.logger import init_logger

from anchorprune_vllm.config import PruneConfig

# Below "vllm": that is the only logger vLLM gives a handler.
logger = init_logger("vllm.anchorprune")


def log_active(config: PruneConfig, text_encoder: str) -> None:
    """Say once per process what is active."""
    video = "" if config.video_budget is None else f", {config.video_budget} per video"
    logger.info_once(
        "AnchorPrune is active: method %s keeps %s visual tokens per item%s, query scope %s, "
        "text encoder %s",
        config.method,
        str(config.budget),
        video,
        config.query,
        text_encoder,
    )

# SPDX-License-Identifier: Apache-2.0
"""The definitions of all metrics, with vLLM's prefix and labels.

The process that reads a request does not know which engine will serve it, so metrics that are
counted there have no label `engine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_PREFIX = "vllm:anchorprune_"
_OF_REQUESTS = ("model_name", "modality")
_OF_ENGINES = ("model_name", "engine")


@dataclass(frozen=True)
class Family:
    """One metric; it has a series for each combination of label values."""

    name: str
    """The name in the files; samples of a counter have `_total` added."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    """The upper limits of a histogram's buckets, without infinity."""

    @property
    def samples(self) -> tuple[str, ...]:
        """Return the names under which the metric is scraped."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "gauge":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


TOKENS_BEFORE = Family(
    f"{_PREFIX}visual_tokens_before",
    "counter",
    "Visual tokens of the images and videos of requests, before pruning.",
    _OF_REQUESTS,
)
TOKENS_AFTER = Family(
    f"{_PREFIX}visual_tokens_after",
    "counter",
    "Visual tokens of the same images and videos in the prompts, after pruning.",
    _OF_REQUESTS,
)
ITEMS_PRUNED = Family(
    f"{_PREFIX}items_pruned",
    "counter",
    "Images and videos of requests that were pruned.",
    _OF_REQUESTS,
)
FALLBACKS = Family(
    f"{_PREFIX}fallbacks",
    "counter",
    "Images and videos that were served in another way, by reason: 'all_kept' = not pruned, as the "
    "budget is not below the number of candidates; 'no_query' = pruned without a question, as none "
    "was found.",
    (*_OF_REQUESTS, "reason"),
)
ANCHOR_TOKENS = Family(
    f"{_PREFIX}anchor_tokens",
    "histogram",
    "Size of the relevance anchor of each image or video that was pruned for a question.",
    _OF_ENGINES,
    (1, 2, 5, 10, 20, 40, 80, 160, 320, 640),
)
SELECTION_SECONDS = Family(
    f"{_PREFIX}selection_seconds",
    "counter",
    "Seconds spent on signals and selection, measured on the device on CUDA, else on the host.",
    _OF_ENGINES,
)
SELECTIONS = Family(
    f"{_PREFIX}selections",
    "counter",
    "Images and videos on which the selection seconds were spent.",
    _OF_ENGINES,
)
CACHE_HITS = Family(
    f"{_PREFIX}feature_cache_hits",
    "counter",
    "Selections for which the vision tower's outputs were already cached.",
    _OF_ENGINES,
)
CACHE_MISSES = Family(
    f"{_PREFIX}feature_cache_misses",
    "counter",
    "Selections for which the vision tower ran.",
    _OF_ENGINES,
)
CACHE_BYTES = Family(
    f"{_PREFIX}feature_cache_bytes",
    "gauge",
    "Bytes of the feature cache in use.",
    _OF_ENGINES,
)
CACHE_CAPACITY = Family(
    f"{_PREFIX}feature_cache_capacity_bytes",
    "gauge",
    "Bytes reserved for the feature cache.",
    _OF_ENGINES,
)

FAMILIES = (
    TOKENS_BEFORE,
    TOKENS_AFTER,
    ITEMS_PRUNED,
    FALLBACKS,
    ANCHOR_TOKENS,
    SELECTION_SECONDS,
    SELECTIONS,
    CACHE_HITS,
    CACHE_MISSES,
    CACHE_BYTES,
    CACHE_CAPACITY,
)

# SPDX-License-Identifier: Apache-2.0
"""Metrics of the worker: sizes of anchors, the time of selection, and the feature cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.methods.registry import ANCHORPRUNE
from anchorprune_vllm.metrics.families import (
    ANCHOR_TOKENS,
    CACHE_BYTES,
    CACHE_CAPACITY,
    CACHE_HITS,
    CACHE_MISSES,
    SELECTION_SECONDS,
    SELECTIONS,
)
from anchorprune_vllm.metrics.files import Series, directory_of
from anchorprune_vllm.metrics.late_counts import LateCounts
from anchorprune_vllm.metrics.stopwatch import Stopwatch


def selection_metrics(vllm_config: Any, config: PruneConfig) -> SelectionMetrics | None:
    """Return the counters for the selections of this worker.

    Returns None if no metrics are wanted, or if another worker of this engine counts the same.
    """
    directory = directory_of(vllm_config.model_config)
    parallel = vllm_config.parallel_config
    if directory is None or parallel.rank != 0:
        return None
    return SelectionMetrics(
        directory,
        vllm_config.model_config.served_model_name,
        str(parallel.data_parallel_index),  # as in vLLM's own label `engine`
        has_anchors=config.method == ANCHORPRUNE,
    )


class Cache(Protocol):
    """A cache that reports its used bytes and its capacity."""

    @property
    def used_bytes(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...


class SelectionMetrics:
    """Counts the selections of one engine."""

    def __init__(self, directory: Path, model_name: str, engine: str, *, has_anchors: bool) -> None:
        labels = (model_name, engine)
        self._anchors = Series(directory, ANCHOR_TOKENS, *labels) if has_anchors else None
        self._seconds = Series(directory, SELECTION_SECONDS, *labels)
        self._selections = Series(directory, SELECTIONS, *labels)
        self._hits = Series(directory, CACHE_HITS, *labels)
        self._misses = Series(directory, CACHE_MISSES, *labels)
        self._bytes = Series(directory, CACHE_BYTES, *labels)
        self._capacity = Series(directory, CACHE_CAPACITY, *labels)
        self._anchor_sizes = LateCounts()
        self._told: tuple[float, int] = (0.0, 0)  # the readings of the stopwatch counted so far

    def show_cache(self, cache: Cache) -> None:
        """Set the gauges for the used bytes and the capacity of the cache."""
        self._bytes.set(cache.used_bytes)
        self._capacity.set(cache.capacity_bytes)

    def count(
        self,
        items: int,
        encoded: int,
        anchors: Sequence[Tensor],
        time: Stopwatch,
        cache: Cache,
    ) -> None:
        """Count one call.

        Args:
            items: The number of images or videos of the call.
            encoded: The number of those for which the tower ran.
            anchors: `is_anchor` [K] of each item with a question.
            time: The total time of signals and selection.
            cache: The feature cache.
        """
        self._hits.add(items - encoded)
        self._misses.add(encoded)
        self.show_cache(cache)
        seconds, selections = time.read()
        self._seconds.add(seconds - self._told[0])
        self._selections.add(selections - self._told[1])
        self._told = (seconds, selections)
        if self._anchors is not None:
            for size in self._anchor_sizes.put(anchors):
                self._anchors.observe(size)

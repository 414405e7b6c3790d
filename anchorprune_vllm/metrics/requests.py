# SPDX-License-Identifier: Apache-2.0
"""Metrics of the process that reads requests: tokens before and after pruning, and fallbacks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from anchorprune_vllm.metrics.families import FALLBACKS, ITEMS_PRUNED, TOKENS_AFTER, TOKENS_BEFORE
from anchorprune_vllm.metrics.files import Series, directory_of, share_directory


def start_metrics(model_config: Any, modalities: Sequence[str]) -> None:
    """Prepare metrics at start-up, in a process that is scraped; all values start at 0."""
    share_directory(model_config)
    for modality in modalities:
        request_metrics(model_config, modality)


def request_metrics(model_config: Any, modality: str) -> RequestMetrics | None:
    """Return the counters for a modality, or None if no metrics are wanted."""
    directory = directory_of(model_config)
    if directory is None:
        return None
    return _request_metrics(directory, model_config.served_model_name, modality)


class RequestMetrics:
    """Counts the images or the videos of requests to a model."""

    def __init__(self, directory: Path, model_name: str, modality: str) -> None:
        labels = (model_name, modality)
        self._before = Series(directory, TOKENS_BEFORE, *labels)
        self._after = Series(directory, TOKENS_AFTER, *labels)
        self._pruned = Series(directory, ITEMS_PRUNED, *labels)
        self._all_kept = Series(directory, FALLBACKS, *labels, "all_kept")
        self._no_query = Series(directory, FALLBACKS, *labels, "no_query")

    def count(self, before: int, after: int, *, lacks_query: bool) -> None:
        """Count one item of a request, with its tokens before and after pruning."""
        self._before.add(before)
        self._after.add(after)
        if after == before:
            self._all_kept.add()
            return
        self._pruned.add()
        if lacks_query:
            self._no_query.add()


_request_metrics = cache(RequestMetrics)

# SPDX-License-Identifier: Apache-2.0
"""What the process knows that reads requests: tokens before and after, and fallbacks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from anchorprune_vllm.metrics.families import FALLBACKS, ITEMS_PRUNED, TOKENS_AFTER, TOKENS_BEFORE
from anchorprune_vllm.metrics.files import Series, directory_of, share_directory


def start_metrics(model_config: Any, modalities: Sequence[str]) -> None:
    """In a process that is scraped, at start-up: all figures are there from then on, at 0."""
    share_directory(model_config)
    for modality in modalities:
        request_metrics(model_config, modality)


def request_metrics(model_config: Any, modality: str) -> RequestMetrics | None:
    """None: no metrics are wanted."""
    directory = directory_of(model_config)
    if directory is None:
        return None
    return _request_metrics(directory, model_config.served_model_name, modality)


class RequestMetrics:
    """Counts a model's images, or its videos."""

    def __init__(self, directory: Path, model_name: str, modality: str) -> None:
        labels = (model_name, modality)
        self._before = Series(directory, TOKENS_BEFORE, *labels)
        self._after = Series(directory, TOKENS_AFTER, *labels)
        self._pruned = Series(directory, ITEMS_PRUNED, *labels)
        self._all_kept = Series(directory, FALLBACKS, *labels, "all_kept")
        self._no_query = Series(directory, FALLBACKS, *labels, "no_query")

    def count(self, before: int, after: int, *, lacks_query: bool) -> None:
        """One item of a request: its tokens unpruned, and in the prompt."""
        self._before.add(before)
        self._after.add(after)
        if after == before:
            self._all_kept.add()
            return
        self._pruned.add()
        if lacks_query:
            self._no_query.add()


_request_metrics = cache(RequestMetrics)

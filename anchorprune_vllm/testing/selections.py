# SPDX-License-Identifier: Apache-2.0
"""Record what a pruner's method is given, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from anchorprune_vllm.selection import Candidates, KeptTokens
from anchorprune_vllm.worker.pruner import VisualPruner


def record_selections(pruner: VisualPruner) -> list[tuple[Candidates, KeptTokens]]:
    """Return a list that all items are added to from now on."""
    method = pruner._method
    record: list[tuple[Candidates, KeptTokens]] = []

    def select(items: Sequence[Candidates]) -> list[KeptTokens]:
        kept = method.select(items)
        record.extend(zip(items, kept, strict=True))
        return kept

    pruner._method = replace(method, select=select)
    return record


@contextmanager
def recorded_selections(pruner: VisualPruner) -> Iterator[list[tuple[Candidates, KeptTokens]]]:
    """Record while the context is open."""
    method = pruner._method
    try:
        yield record_selections(pruner)
    finally:
        pruner._method = method

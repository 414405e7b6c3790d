# SPDX-License-Identifier: Apache-2.0
"""Which worker counts, and under which labels; what it counts is in test_pruner.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.metrics.families import ANCHOR_TOKENS, SELECTIONS
from anchorprune_vllm.metrics.selections import selection_metrics
from tests.support.scrapes import Scrape


def vllm_config(directory: Path | None, rank: int, engine: int) -> Any:
    """What a worker is given; a dense model's data-parallel rank is 0 in every engine."""
    model = SimpleNamespace(served_model_name="model", anchorprune_metrics=directory)
    parallel = SimpleNamespace(rank=rank, data_parallel_index=engine, data_parallel_rank=0)
    return SimpleNamespace(model_config=model, parallel_config=parallel)


@pytest.mark.parametrize("method", ["anchorprune", "divprune"])
def test_the_first_worker_of_each_engine_counts(tmp_path: Path, method: str) -> None:
    config = PruneConfig(budget=16, method=method)
    counting = {
        (engine, rank): selection_metrics(vllm_config(tmp_path, rank, engine), config) is not None
        for engine in (0, 1)
        for rank in (0, 1)
    }
    assert counting == {(0, 0): True, (0, 1): False, (1, 0): True, (1, 1): False}
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    scrape = Scrape.of(registry)
    for engine in ("0", "1"):
        assert scrape.value(SELECTIONS, model_name="model", engine=engine) == 0
    assert (f"{ANCHOR_TOKENS.name}_sum" in scrape.names) == (method == "anchorprune")


def test_nobody_counts_where_no_metrics_are_wanted() -> None:
    assert selection_metrics(vllm_config(None, 0, 0), PruneConfig(budget=16)) is None

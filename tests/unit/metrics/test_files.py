# SPDX-License-Identifier: Apache-2.0
"""Figures of several processes, as the scraped one shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.v1.metrics.prometheus import get_prometheus_registry, unregister_vllm_metrics

from anchorprune_vllm.metrics.families import (
    ANCHOR_TOKENS,
    CACHE_BYTES,
    FAMILIES,
    SELECTIONS,
)
from anchorprune_vllm.metrics.files import Series, directory_of, share_directory
from tests.support.scrapes import Scrape

OTHER_PROCESS = """
import sys
from pathlib import Path
from anchorprune_vllm.metrics.families import ANCHOR_TOKENS, CACHE_BYTES, SELECTIONS
from anchorprune_vllm.metrics.files import Series
directory = Path(sys.argv[1])
Series(directory, SELECTIONS, "model", "0").add(5)
Series(directory, SELECTIONS, "model", "1").add(7)
Series(directory, ANCHOR_TOKENS, "model", "0").observe(3)
Series(directory, CACHE_BYTES, "model", "0").set(999)
"""


def read(directory: Path) -> Scrape:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory))
    return Scrape.of(registry)


def test_processes_are_added_up(tmp_path: Path) -> None:
    Series(tmp_path, CACHE_BYTES, "model", "0").set(1)
    selections = Series(tmp_path, SELECTIONS, "model", "0")
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(tmp_path)], check=True)
    selections.add(2)
    Series(tmp_path, SELECTIONS, "model", "2").add(1)
    Series(tmp_path, ANCHOR_TOKENS, "model", "0").observe(4)
    scrape = read(tmp_path)
    assert scrape.value(SELECTIONS, engine="0") == 7
    assert scrape.value(SELECTIONS, engine="1") == 7
    assert scrape.value(SELECTIONS, engine="2") == 1
    assert scrape.value(f"{ANCHOR_TOKENS.name}_count", engine="0") == 2
    assert scrape.value(f"{ANCHOR_TOKENS.name}_sum", engine="0") == 7
    assert scrape.value(CACHE_BYTES, engine="0") == 999  # the latest


def test_a_second_series_of_the_same_labels_adds_to_the_first(tmp_path: Path) -> None:
    first, second = (Series(tmp_path, SELECTIONS, "model", "0") for _ in range(2))
    for series in (first, second, first):
        series.add(2)
    assert read(tmp_path).value(SELECTIONS) == 6


def test_all_begin_at_zero(tmp_path: Path) -> None:
    for family in FAMILIES:
        Series(tmp_path, family, *(["x"] * len(family.labels)))
    scrape = read(tmp_path)
    assert scrape.names == {name for family in FAMILIES for name in family.samples}
    assert {value for (name, _), value in scrape.values.items()} == {0}


@pytest.mark.parametrize(("size", "limit"), [(0, "1.0"), (1, "1.0"), (2, "2.0"), (641, "+Inf")])
def test_bucket(tmp_path: Path, size: int, limit: str) -> None:
    Series(tmp_path, ANCHOR_TOKENS, "model", "0").observe(size)
    scrape = read(tmp_path)
    filled = [
        dict(labels)["le"]
        for (name, labels), value in scrape.values.items()
        if name.endswith("_bucket") and value
    ]
    assert min(filled, key=float) == limit
    assert scrape.value(f"{ANCHOR_TOKENS.name}_bucket", le="+Inf") == 1


def test_several_api_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own directory: what its /metrics reads then has ours in it."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    model_config = SimpleNamespace()
    share_directory(model_config)
    directory = directory_of(model_config)
    assert directory == tmp_path
    Series(directory, SELECTIONS, "shared", "0").add(3)
    assert Scrape.of(get_prometheus_registry()).value(SELECTIONS, model_name="shared") == 3


def test_one_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of ours: vLLM's /metrics has ours beside its own, and keeps them."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    model_configs = [SimpleNamespace(), SimpleNamespace()]
    for model_config in model_configs:  # a second model in this process: no metric twice
        share_directory(model_config)
    directory = directory_of(model_configs[0])
    assert directory == directory_of(model_configs[1]) is not None
    Series(directory, SELECTIONS, "alone", "0").add(3)
    assert get_prometheus_registry() is REGISTRY
    theirs = Counter("vllm:of_vllm", "A metric of vLLM's own.")
    theirs.inc()
    assert Scrape.of(REGISTRY).value("vllm:of_vllm_total") == 1
    unregister_vllm_metrics()  # as for every new engine
    scrape = Scrape.of(REGISTRY)
    assert scrape.value(SELECTIONS, model_name="alone") == 3
    assert "vllm:of_vllm_total" not in scrape.names


def test_none_without_a_directory(tmp_path: Path) -> None:
    assert directory_of(SimpleNamespace()) is None
    assert directory_of(SimpleNamespace(anchorprune_metrics=str(tmp_path / "elsewhere"))) is None

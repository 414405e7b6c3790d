# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from anchorprune_vllm.metrics.families import FALLBACKS, ITEMS_PRUNED, TOKENS_AFTER, TOKENS_BEFORE
from anchorprune_vllm.metrics.requests import RequestMetrics
from tests.support.scrapes import Scrape


def test_items_are_pruned_or_kept_and_may_lack_a_question(tmp_path: Path) -> None:
    images, videos = (RequestMetrics(tmp_path, "model", name) for name in ("image", "video"))
    images.count(576, 64, lacks_query=False)
    images.count(576, 16, lacks_query=True)
    images.count(32, 32, lacks_query=True)  # nothing was asked of the pruner
    videos.count(2704, 512, lacks_query=False)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    scrape = Scrape.of(registry)
    image, video = {"modality": "image"}, {"modality": "video"}
    assert scrape.value(TOKENS_BEFORE, **image) == 576 + 576 + 32
    assert scrape.value(TOKENS_AFTER, **image) == 64 + 16 + 32
    assert scrape.value(ITEMS_PRUNED, **image) == 2
    assert scrape.value(FALLBACKS, reason="all_kept", **image) == 1
    assert scrape.value(FALLBACKS, reason="no_query", **image) == 1
    assert scrape.value(TOKENS_AFTER, **video) == 512
    assert scrape.value(FALLBACKS, **video) == 0

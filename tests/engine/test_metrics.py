# SPDX-License-Identifier: Apache-2.0
"""A scrape of `/metrics` after requests whose figures are known."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from anchorprune_vllm.metrics.families import (
    ANCHOR_TOKENS,
    CACHE_BYTES,
    CACHE_CAPACITY,
    CACHE_HITS,
    CACHE_MISSES,
    FALLBACKS,
    ITEMS_PRUNED,
    SELECTION_SECONDS,
    SELECTIONS,
    TOKENS_AFTER,
    TOKENS_BEFORE,
)
from anchorprune_vllm.testing.demo_models.make import find_text_encoder
from anchorprune_vllm.testing.server import VllmServer
from tests.support.chats import chat, client_of, user
from tests.support.dashboard import expressions, metrics_in
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference, reference_of
from tests.support.scrapes import Scrape

FIGURES = {
    "before": (TOKENS_BEFORE, {"modality": "image"}),
    "after": (TOKENS_AFTER, {"modality": "image"}),
    "pruned": (ITEMS_PRUNED, {"modality": "image"}),
    "all_kept": (FALLBACKS, {"modality": "image", "reason": "all_kept"}),
    "no_query": (FALLBACKS, {"modality": "image", "reason": "no_query"}),
    "selections": (SELECTIONS, {}),
    "hits": (CACHE_HITS, {}),
    "misses": (CACHE_MISSES, {}),
    "anchors": (f"{ANCHOR_TOKENS.name}_count", {}),
    "anchor tokens": (f"{ANCHOR_TOKENS.name}_sum", {}),
    "prompt tokens": ("vllm:prompt_tokens_total", {}),
}


class Growth:
    """How much each figure has grown since this was made."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        scrape = Scrape.from_server(self._server.url)
        return {
            what: scrape.value(name, model_name="demo", **labels)
            for what, (name, labels) in FIGURES.items()
        }

    def read(self) -> dict[str, float]:
        return {what: now - self._before[what] for what, now in self._read().items()}


def ask_at_once(server: VllmServer, asked: list[tuple[str, tuple[int, ...], Any]]) -> float:
    """Prompt tokens of all replies."""
    client = client_of(server)
    with ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(lambda a: chat(client, user(a[0], *a[1]), override=a[2], max_tokens=2), asked)
        )
    return sum(reply.usage.prompt_tokens for reply in replies)


def test_figures_equal_the_requests(server: VllmServer, reference: Reference) -> None:
    growth = Growth(server)
    questions, seeds = QUESTIONS[:4], (700, 701, 702)
    asked: list[tuple[str, tuple[int, ...], Any]] = [
        *((question, (seed,), None) for question in questions for seed in seeds),
        (QUESTIONS[4], (703, 704), {"budget": 8}),
        ("", (705,), None),
        (QUESTIONS[5], (706,), {"query": "none"}),
        (QUESTIONS[5], (700,), {"budget": "100%"}),
        (QUESTIONS[5], (701,), {"budget": 100_000}),
    ]
    prompt_tokens = ask_at_once(server, asked)
    unpruned = {seed: reference.unpruned(picture(seed)) for seed in range(700, 707)}
    anchors = [
        *(reference.anchor_size(picture(s), q, 16) for q in questions for s in seeds),
        *(reference.anchor_size(picture(s), QUESTIONS[4], 8) for s in (703, 704)),
    ]
    assert growth.read() == {
        "before": sum(unpruned[seed] for _, items, _ in asked for seed in items),
        "after": 12 * 16 + 2 * 8 + 2 * 16 + unpruned[700] + unpruned[701],
        "pruned": 12 + 2 + 2,
        "all_kept": 2,
        "no_query": 1,
        "selections": 12 + 2 + 2,
        "misses": 7,  # a picture whose tower outputs are not there yet; unpruned ones look for none
        "hits": 9,
        "anchors": 14,  # where nothing is asked there is none
        "anchor tokens": sum(anchors),
        "prompt tokens": prompt_tokens,
    }


def test_the_same_request_again(server: VllmServer, reference: Reference) -> None:
    """Its tokens count; its embeddings are vLLM's to keep, so nothing is selected."""
    again = [(QUESTIONS[6], (710,), None)]
    ask_at_once(server, again)
    growth = Growth(server)
    ask_at_once(server, again)
    grown = growth.read()
    assert grown["before"] == reference.unpruned(picture(710))
    assert (grown["after"], grown["pruned"]) == (16, 1)
    assert (grown["selections"], grown["hits"], grown["misses"]) == (0, 0, 0)


def test_gauges_and_seconds(server: VllmServer) -> None:
    ask_at_once(server, [(QUESTIONS[7], (711,), None)])
    scrape = Scrape.from_server(server.url)
    assert 0 < scrape.value(CACHE_BYTES) <= scrape.value(CACHE_CAPACITY) <= 8 * 2**20
    assert scrape.value(SELECTION_SECONDS, engine="0") > 0


def test_the_dashboard_names_what_is_there(server: VllmServer) -> None:
    names = Scrape.from_server(server.url).names
    assert set().union(*map(metrics_in, expressions())) - names == set()


@pytest.fixture(scope="module")
def two_servers_and_engines(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    flags = [
        *("--anchorprune-budget", "16"),
        *("--anchorprune-text-encoder", str(find_text_encoder(demo_model))),
        *("--api-server-count", "2", "--data-parallel-size", "2"),
        *("--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "2048", "--kv-cache-memory-bytes", "64M", "--block-size", "32"),
    ]
    log = tmp_path_factory.mktemp("servers") / "server.log"
    # From vLLM 0.33 on, each engine on a CPU wants a memory node: they share the first.
    nodes = {"CPU_VISIBLE_MEMORY_NODES": "0,0"}
    with VllmServer(demo_model, flags, log, start_seconds=600, env=nodes) as running:
        yield running


def test_two_api_servers_and_two_engines(
    two_servers_and_engines: VllmServer, demo_model: Path
) -> None:
    """Whichever server answers, a scrape has the sum, and each thing in it once."""
    server, reference = two_servers_and_engines, reference_of(demo_model)
    seeds, questions = range(720, 728), QUESTIONS[:3]
    prompt_tokens = ask_at_once(server, [(q, (seed,), None) for q in questions for seed in seeds])
    items = len(seeds) * len(questions)
    first, *others = (Scrape.from_server(server.url) for _ in range(8))
    assert all(scrape.ours == first.ours for scrape in others)
    assert first.value("vllm:prompt_tokens_total") == prompt_tokens
    assert first.value(TOKENS_BEFORE) == items * reference.unpruned(picture(720))
    assert first.value(TOKENS_AFTER) == items * 16
    assert first.value(ITEMS_PRUNED) == first.value(SELECTIONS) == items
    assert first.value(FALLBACKS) == 0
    assert first.value(CACHE_HITS) + first.value(CACHE_MISSES) == items
    assert len(seeds) <= first.value(CACHE_MISSES) <= 2 * len(seeds)  # each engine has its own
    for engine in ("0", "1"):
        assert first.value(SELECTIONS, engine=engine) > 0
    sizes = [reference.anchor_size(picture(seed), q, 16) for q in questions for seed in seeds]
    assert first.value(f"{ANCHOR_TOKENS.name}_sum") == sum(sizes)

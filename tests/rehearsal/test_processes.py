# SPDX-License-Identifier: Apache-2.0
"""The device reaches the processes that vLLM starts: an engine of its own, and `vllm serve`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from anchorprune_vllm.metrics.families import ANCHOR_TOKENS, CACHE_MISSES, SELECTIONS
from anchorprune_vllm.testing.demo_models.make import find_text_encoder
from anchorprune_vllm.testing.media import as_data_url
from anchorprune_vllm.testing.server import VllmServer
from tests.rehearsal.comparison import LOGPROB_TOLERANCE, Rehearsal
from tests.rehearsal.conftest import Rehearse, Stage, environment_of
from tests.rehearsal.job import Engine, Job
from tests.support.pictures import QUESTIONS, picture
from tests.support.scrapes import Scrape


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_an_engine_in_its_own_process(demo_model: Path, rehearse: Rehearse, runner: Any) -> None:
    engine = Engine("apart", ["pruned", "cached", "mixed"], {"positions": "native"})
    job = Job(str(demo_model), [engine], in_own_process=True)
    rehearsal = Rehearsal(rehearse(job, "cpu")["apart"], rehearse(job, runner)["apart"])
    rehearsal.check_platform(runner)
    rehearsal.check_answers()
    rehearsal.check_metrics()


@pytest.fixture(scope="module")
def servers(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Stage, VllmServer]]:
    """`vllm serve` on both platforms, with the same flags."""
    flags = [
        *("--anchorprune-budget", "16", "--trust-request-mm-kwargs"),
        *("--anchorprune-text-encoder", str(find_text_encoder(demo_model))),
        *("--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", "64M", "--block-size", "32"),
    ]
    stages: tuple[Stage, ...] = ("cpu", "V2")
    made = [
        VllmServer(
            demo_model,
            flags,
            tmp_path_factory.mktemp(stage) / "server.log",
            start_seconds=600,
            env=environment_of(stage),
        )
        for stage in stages
    ]
    with ThreadPoolExecutor(2) as pool, ExitStack() as running:
        starting = [pool.submit(running.enter_context, server) for server in made]
        yield {stage: future.result() for stage, future in zip(stages, starting, strict=True)}


def test_serve(servers: dict[Stage, VllmServer]) -> None:
    asked: list[tuple[str, int, Any]] = [
        (QUESTIONS[0], 1, None),
        (QUESTIONS[1], 1, None),
        (QUESTIONS[1], 1, None),
        (QUESTIONS[2], 2, {"budget": "100%"}),
        (QUESTIONS[3], 3, {"budget": 40}),
    ]
    answers = {
        stage: [talk(server, *request) for request in asked] for stage, server in servers.items()
    }
    for given, wanted in zip(answers["V2"], answers["cpu"], strict=True):
        assert [token for token, _ in given] == [token for token, _ in wanted]
        assert [logprob for _, logprob in given] == pytest.approx(
            [logprob for _, logprob in wanted], abs=LOGPROB_TOLERANCE
        )
    scrapes = {stage: Scrape.from_server(server.url) for stage, server in servers.items()}
    assert [scrape.value(CACHE_MISSES) for scrape in scrapes.values()] == [2, 2]
    # What the device counts comes with the next call.
    anchors = f"{ANCHOR_TOKENS.name}_count"
    assert (scrapes["cpu"].value(SELECTIONS), scrapes["cpu"].value(anchors)) == (3, 3)
    assert (scrapes["V2"].value(SELECTIONS), scrapes["V2"].value(anchors)) == (2, 2)


def talk(server: VllmServer, question: str, seed: int, override: Any) -> list[tuple[str, float]]:
    """Tokens of an answer and their log-probabilities."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
    image = {"type": "image_url", "image_url": {"url": as_data_url(picture(seed))}}
    reply = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": [image, {"type": "text", "text": question}]}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        extra_body={"mm_processor_kwargs": {"anchorprune": override}} if override else None,
    )
    return [(token.token, token.logprob) for token in reply.choices[0].logprobs.content]

# SPDX-License-Identifier: Apache-2.0
"""Engines shared by the tests: each is started once per model."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from anchorprune_vllm.testing.demo_models.make import find_text_encoder
from anchorprune_vllm.testing.server import VllmServer
from tests.support.engine import GREEDY, make_engine, media_of, watch
from tests.support.plain_vllm import mixed_requests
from tests.support.runners import RUNNERS, engine_on, is_left_out, runner_of
from tests.support.seen_positions import watch_positions

# Functions are sent to the workers, to look into them.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
# Commands of ours that run in this process would set it lower, also for later servers.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")

_FOLDER = Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.engine)
    parameters = _parameters(item)
    if "runner" in parameters:
        # Now, as for another value pytest would start the same engine once more.
        parameters["runner"] = runner_of(parameters["runner"], parameters["any_model"])


@pytest.hookimpl(trylast=True)  # after pytest's own order
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Given here are the tests of all folders.
    ours = [item for item in items if item.path.is_relative_to(_FOLDER)]
    left_out = [item for item in ours if is_left_out(_parameters(item))]
    config.hook.pytest_deselected(items=left_out)
    others = [item for item in items if item not in ours]
    ours = [item for item in ours if item not in left_out]
    # Sorted, else engines would be started again and again.
    items[:] = [*others, *sorted(ours, key=_model_and_runner)]


def _model_and_runner(item: pytest.Item) -> tuple[str, str]:
    parameters = _parameters(item)
    return parameters.get("any_model", ""), parameters.get("runner", RUNNERS[0])


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> str:
    """The model runner of `pruned`, `plugin_off` and `native`: the first, unless a test says."""
    return getattr(request, "param", RUNNERS[0])


@pytest.fixture(scope="session", autouse=True)
def shared_process_group() -> Iterator[None]:
    """Engines of this process share a process group: one that ends must leave it to the others.

    vLLM collects garbage at each start of an engine: modules, which stay, are left out of that.
    """
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", gc.collect)
        yield


@pytest.fixture(scope="session")
def pruned(request: pytest.FixtureRequest, any_model: Path, runner: str) -> Iterator[LLM]:
    """Budget 16, all caches on, prompts computed 64 tokens at a time."""
    if runner == RUNNERS[0]:  # most tests use it: while they run, the processes of others start
        request.getfixturevalue("plain_vllm")
        request.getfixturevalue("starting_server")
    with engine_on(runner, any_model, 16, max_num_batched_tokens=64) as llm:
        watch(llm)
        yield llm


@pytest.fixture(scope="session")
def plugin_off(any_model: Path, runner: str) -> Iterator[LLM]:
    """The plugin is loaded, no budget is given."""
    with engine_on(runner, any_model, None, max_num_batched_tokens=64) as llm:
        watch(llm)
        yield llm


@pytest.fixture(scope="session")
def native(any_model: Path, runner: str) -> Iterator[LLM]:
    """Native positions, prompts computed 48 tokens at a time, KV cache for 20 blocks of 32."""
    with engine_on(
        runner,
        any_model,
        16,
        settings={"positions": "native"},
        max_num_batched_tokens=48,
        max_num_seqs=48,
        max_model_len=512,
        num_gpu_blocks_override=20,
    ) as llm:
        watch(llm)
        watch_positions(llm)
        yield llm


@pytest.fixture  # for one test: it holds gigabytes
def tensor_parallel(any_model: Path) -> Iterator[LLM]:
    with two_ranks(any_model) as llm:
        yield llm


@pytest.fixture  # for one test: it holds gigabytes
def data_parallel_tower(any_model: Path) -> Iterator[LLM]:
    """The language model is split over two ranks, the images of a call are divided among them."""
    with two_ranks(any_model, mm_encoder_tp_mode="data") as llm:
        yield llm


@contextmanager
def two_ranks(model: Path, **options: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # of each rank's process
        with make_engine(model, 16, tensor_parallel_size=2, **options) as llm:
            watch(llm)
            yield llm


@pytest.fixture(scope="session")
def mixed(any_model: Path) -> list[dict[str, Any]]:
    """Requests of all kinds, to which vLLM without the plugin gives `plain_answers`."""
    return mixed_requests(any_model)


@pytest.fixture(scope="session")
def plain_vllm(
    any_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[bytes], Path] | None]:
    """vLLM without the plugin, at work in a process of its own: this one has loaded the plugin.

    None for a model that vLLM does not know.
    """
    if is_llava_video(any_model):
        yield None
        return
    out = tmp_path_factory.mktemp("plain") / "answers.json"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.plain_vllm", str(any_model), str(out)],
        env={**os.environ, "VLLM_PLUGINS": ""},
        cwd=Path(__file__).parents[2],
    ) as process:
        yield process, out


def is_llava_video(model: Path) -> bool:
    return json.loads((model / "config.json").read_text())["model_type"] == "llava_qwen"


@pytest.fixture(scope="session")
def plain_answers(
    plain_vllm: tuple[subprocess.Popen[bytes], Path] | None, mixed: list[dict[str, Any]], reference
) -> list[list[int]]:
    """Answers to `mixed` of vLLM without the plugin, or of transformers if it does not know how."""
    if plain_vllm is None:
        return [
            reference.unpruned_answer(item["prompt"], media_of(item), GREEDY.max_tokens)
            for item in mixed
        ]
    process, out = plain_vllm
    assert process.wait() == 0
    return json.loads(out.read_text())


@pytest.fixture(scope="session")
def starting_server(
    any_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Future[VllmServer]]:
    """`vllm serve` with the flags a user gives, and overrides allowed."""
    text_encoder = find_text_encoder(any_model)
    architectures = json.loads((any_model / "config.json").read_text())["architectures"]
    flags = [
        *("--anchorprune-budget", "16"),
        *(["--anchorprune-text-encoder", str(text_encoder)] if text_encoder else []),
        *("--anchorprune-config", '{"tau": 0.2, "feature_cache_mb": 8}'),
        "--trust-request-mm-kwargs",
        *("--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "2048", "--kv-cache-memory-bytes", "128M", "--block-size", "32"),
        # Parsed after ours and merged with it, not put in its place.
        *("--hf-overrides", json.dumps({"architectures": architectures})),
        "--enable-prompt-tokens-details",
        # One of them gets its media through shared memory.
        *(["--mm-tensor-ipc", "torch_shm"] if any_model.parent.name == "llava-next" else []),
    ]
    log = tmp_path_factory.mktemp("server") / "server.log"
    with ThreadPoolExecutor(1) as pool:
        running = VllmServer(any_model, flags, log)
        started = pool.submit(running.__enter__)
        yield started
        started.exception()  # waits: a process that is still starting could not be stopped
        running.stop()


@pytest.fixture(scope="session")
def server(starting_server: Future[VllmServer]) -> VllmServer:
    return starting_server.result()

# SPDX-License-Identifier: Apache-2.0
"""What a benchmark reads from a running server, and the part of it that runs in vLLM's worker."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from anchorprune_vllm.metrics.stopwatch import Stopwatch
from anchorprune_vllm.testing.server import NO_PROXY, VllmServer

FLAGS = ("--worker-extension-cls", "anchorprune_vllm.commands.bench.probes.WorkerTimes")
ENV = {"VLLM_SERVER_DEV_MODE": "1"}  # without it there is no /collective_rpc
_SECONDS = 120
_PROCESSES = Path("/proc")


class StageTimes(BaseModel):
    """What a worker has spent since `start_timing`."""

    embedding_seconds: float  # in calls that embed media
    selection_seconds: float  # signals and selection, a part of the above
    device_bytes: int | None = None  # peak of what is allocated on a GPU, without the KV cache

    def since(self, before: StageTimes) -> dict[str, float]:
        """Return the seconds spent since an earlier reading."""
        return {
            "embedding_seconds": self.embedding_seconds - before.embedding_seconds,
            "selection_seconds": self.selection_seconds - before.selection_seconds,
        }


class WorkerTimes:
    """Methods that `--worker-extension-cls` adds to vLLM's worker.

    vLLM has encoder times of its own, but they wait for the device around every call, and no flag
    turns them on.
    """

    model_runner: Any

    def anchorprune_start_timing(self) -> None:
        """Begin to time the calls that embed media, and to record the peak of the memory."""
        model, watch = self.model_runner.get_model(), Stopwatch()
        embed, device = model.embed_multimodal, self.model_runner.device

        def timed(**kwargs: Any) -> Any:
            with watch.timing(1, device):
                return embed(**kwargs)

        model.embed_multimodal, model.anchorprune_embedding_time = timed, watch
        if torch.cuda.is_available():
            # At start-up vLLM tries the largest batch, and requests may need less.
            torch.cuda.reset_peak_memory_stats()

    def anchorprune_read_times(self) -> dict[str, Any]:
        """Return the fields of `StageTimes`."""
        model = self.model_runner.get_model()
        pruner = getattr(model, "_pruner", None)
        times = StageTimes(
            embedding_seconds=model.anchorprune_embedding_time.read()[0],
            selection_seconds=pruner.selection_time.read()[0] if pruner else 0.0,
        )
        if torch.cuda.is_available():
            # vLLM fills the device with its KV cache, however much of it requests need.
            cache = {tensor.data_ptr(): tensor.nbytes for tensor in self.model_runner.kv_caches}
            times.device_bytes = torch.cuda.max_memory_allocated() - sum(cache.values())
        return times.model_dump()


def start_timing(server: VllmServer) -> None:
    """Start the clocks of the workers, once in a server's life."""
    _call_worker(server, "anchorprune_start_timing")


def read_times(server: VllmServer) -> StageTimes:
    """Read the clocks of the first worker; under tensor parallelism all do the same."""
    return StageTimes.model_validate(_call_worker(server, "anchorprune_read_times"))


def _call_worker(server: VllmServer, method: str) -> Any:
    request = urllib.request.Request(
        f"{server.url}/collective_rpc",
        data=json.dumps({"method": method}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with NO_PROXY.open(request, timeout=_SECONDS) as response:
        return json.loads(response.read())["results"][0]


def read_kv_tokens(server: VllmServer) -> int:
    """Return the number of tokens that fit the KV caches of all engines."""
    with NO_PROXY.open(f"{server.url}/metrics", timeout=_SECONDS) as response:
        return kv_tokens(response.read().decode())


def kv_tokens(metrics: str) -> int:
    """Return the same from the text of `/metrics`."""
    samples = [
        each for family in text_string_to_metric_families(metrics) for each in family.samples
    ]
    caches = [each.labels for each in samples if each.name == "vllm:cache_config_info"]
    if not caches:
        raise RuntimeError("vLLM's /metrics has no vllm:cache_config_info: cannot tell KV space")
    return sum(int(cache["num_gpu_blocks"]) * int(cache["block_size"]) for cache in caches)


def host_bytes(session: int) -> int:
    """Return the peak memory of all processes of a session, each at its own time."""
    kibibytes: list[str] = []
    for process in _PROCESSES.glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if os.getsid(int(process.name)) == session:
                status = (process / "status").read_text()
                kibibytes += re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * sum(map(int, kibibytes))

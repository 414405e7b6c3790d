# SPDX-License-Identifier: Apache-2.0
"""What a benchmark asks a running server, beside its answers."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from anchorprune_vllm.testing.server import NO_PROXY, VllmServer

WORKER = "anchorprune_vllm.commands.bench.worker.StageTimes"
FLAGS = ("--worker-extension-cls", WORKER)
ENV = {"VLLM_SERVER_DEV_MODE": "1"}  # without it there is no /collective_rpc
_SECONDS = 120
_PROCESSES = Path("/proc")


@dataclass(frozen=True)
class Stages:
    """What the worker has spent since timing began."""

    embedding_seconds: float
    """In calls that embed media, the whole of them."""
    selection_seconds: float
    """Signals and selection, a part of it."""
    device_bytes: int | None = None
    """The most that was allocated on a GPU, without vLLM's KV cache."""


def start_timing(server: VllmServer) -> None:
    """To be called once, before `read_stages`."""
    _call_workers(server, "anchorprune_start_timing")


def read_stages(server: VllmServer) -> Stages:
    """Of the first worker: under tensor parallelism all do the same."""
    found = _call_workers(server, "anchorprune_read_stages")[0]
    device_bytes = found.get("device_bytes")
    return Stages(
        found["embedding_seconds"],
        found["selection_seconds"],
        None if device_bytes is None else int(device_bytes),
    )


def read_kv_tokens(server: VllmServer) -> int:
    """Tokens for which the KV cache has room."""
    with NO_PROXY.open(f"{server.url}/metrics", timeout=_SECONDS) as response:
        return kv_tokens(response.read().decode())


def kv_tokens(metrics: str) -> int:
    """The same, from the text of `/metrics`: over all engines."""
    found = re.findall(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    sizes = [dict(re.findall(r'(\w+)="([^"]*)"', labels)) for labels in found]
    if not sizes:
        raise RuntimeError("vLLM's /metrics has no vllm:cache_config_info: cannot tell KV space")
    return sum(int(size["num_gpu_blocks"]) * int(size["block_size"]) for size in sizes)


def host_bytes(session: int) -> int:
    """The most memory that the processes of a session have had, each at its own time."""
    return sum(_peak(path, session) for path in _PROCESSES.iterdir() if path.name.isdecimal())


def _peak(process: Path, session: int) -> int:
    try:
        if os.getsid(int(process.name)) != session:
            return 0
        status = (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _call_workers(server: VllmServer, method: str) -> list[dict[str, float]]:
    request = urllib.request.Request(
        f"{server.url}/collective_rpc",
        data=json.dumps({"method": method}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with NO_PROXY.open(request, timeout=_SECONDS) as response:
        results: list[dict[str, float]] = json.loads(response.read())["results"]
        return results

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anchorprune_vllm.commands.bench import probes
from anchorprune_vllm.commands.bench.probes import (
    ENV,
    FLAGS,
    WorkerTimes,
    host_bytes,
    kv_tokens,
)
from anchorprune_vllm.metrics import stopwatch
from anchorprune_vllm.metrics.stopwatch import Stopwatch

METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50",sliding_window="None"} 1.0
vllm:num_requests_running{engine="0"} 0.0
"""


def test_kv_space_is_that_of_all_engines() -> None:
    assert kv_tokens(METRICS) == 16 * 150
    with pytest.raises(RuntimeError, match="no vllm:cache_config_info"):
        kv_tokens("vllm:other 1.0")


def test_memory_is_that_of_a_session_and_its_highest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = {"10": 10, "11": 10, "12": 12, "13": 10}  # the last ends before it is read
    for process, peak in (("10", 1000), ("11", 1100), ("12", 1200), ("self", 1)):
        (tmp_path / process).mkdir()
        status = f"Name:\tpython\nVmHWM:\t   {peak} kB\nVmRSS:\t5 kB"
        (tmp_path / process / "status").write_text(status)
    (tmp_path / "13").mkdir()
    (tmp_path / "14").mkdir()  # has ended already
    monkeypatch.setattr(probes, "_PROCESSES", tmp_path)
    monkeypatch.setattr(probes.os, "getsid", lambda pid: get_session(sessions, pid))
    assert host_bytes(10) == 1024 * (1000 + 1100)
    assert host_bytes(12) == 1024 * 1200
    assert host_bytes(99) == 0


def get_session(sessions: dict[str, int], pid: int) -> int:
    if str(pid) not in sessions:
        raise ProcessLookupError
    return sessions[str(pid)]


def test_memory_of_this_session() -> None:
    assert host_bytes(os.getsid(0)) > 0


class Model:
    def __init__(self) -> None:
        self._pruner = type("Pruner", (), {"selection_time": Stopwatch()})()

    def embed_multimodal(self, **kwargs):
        with self._pruner.selection_time.timing(1, torch.device("cpu")):
            return [kwargs["pixels"]]


class Runner:
    device = torch.device("cpu")

    def __init__(self, model) -> None:
        self.model = model

    def get_model(self):
        return self.model


@pytest.mark.parametrize("pruned", [True, False])
def test_stages_of_a_worker(pruned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=count().__next__))
    worker = WorkerTimes()
    worker.model_runner = Runner(Model())
    if not pruned:
        worker.model_runner.model.embed_multimodal = lambda **kwargs: [kwargs["pixels"]]
        worker.model_runner.model._pruner = None
    worker.anchorprune_start_timing()
    assert worker.anchorprune_read_times()["embedding_seconds"] == 0
    assert worker.model_runner.model.embed_multimodal(pixels=3) == [3]
    stages = worker.anchorprune_read_times()
    # Every look at the clock is a second: two of selection are between two of the whole.
    assert stages["embedding_seconds"] == (3 if pruned else 1)
    assert stages["selection_seconds"] == (1 if pruned else 0)


def test_memory_of_starting_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"now": 700, "peak": 900}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda: device.update(peak=device["now"])
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: device["peak"])
    worker = WorkerTimes()
    worker.model_runner = Runner(Model())
    worker.model_runner.kv_caches = [torch.zeros(100, dtype=torch.uint8)]
    worker.anchorprune_start_timing()
    device["peak"] = max(device["peak"], 750)
    assert worker.anchorprune_read_times()["device_bytes"] == 750 - 100


def test_the_flags_name_it() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname(FLAGS[1]) is WorkerTimes
    assert set(ENV) == {"VLLM_SERVER_DEV_MODE"}

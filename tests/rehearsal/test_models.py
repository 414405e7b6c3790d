# SPDX-License-Identifier: Apache-2.0
"""Every model on vLLM's CUDA platform, with both runners and both kinds of positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anchorprune_vllm.testing.demo_models.make import DEMO_MODELS
from tests.rehearsal.comparison import Rehearsal
from tests.rehearsal.conftest import ROW, Rehearse
from tests.rehearsal.job import Engine, Job

WITH_VIDEOS = ("qwen2.5-vl", "llava-onevision", "llava-video")
STEPS = ["pruned", "cached", "whole", "embeddings", "mixed", "videos", "reloaded"]
COMPACT = Engine("compact", STEPS, {"positions": "compact"})
NATIVE = Engine("native", STEPS, {"positions": "native"})
TIGHT = Engine(
    "tight",
    ["preempted", "cut"],
    {"positions": "native"},
    # KV cache for ten blocks of 32 tokens
    {"max_model_len": 256, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 11},
)
CASES = [
    pytest.param(arch, runner, engine.name, id=f"{arch}-{runner}-{engine.name}")
    for arch in DEMO_MODELS
    for runner in ("V1", "V2")
    for engine in (COMPACT, NATIVE, TIGHT)
    if (arch, engine.name) != ("qwen2.5-vl", "compact")  # M-RoPE
]


@pytest.fixture
def rehearsal(
    arch: str, runner: Any, engine: str, small_models: Callable[[str], Path], rehearse: Rehearse
) -> Rehearsal:
    engines = [NATIVE, TIGHT] if arch == "qwen2.5-vl" else [COMPACT, NATIVE, TIGHT]
    job = Job(str(small_models(arch)), engines)
    return Rehearsal(rehearse(job, "cpu")[engine], rehearse(job, runner)[engine])


@pytest.mark.parametrize(("arch", "runner", "engine"), CASES)
class TestEngine:
    def test_answers(
        self,
        rehearsal: Rehearsal,
        arch: str,
        runner: str,
        engine: str,
        record_property: Callable[[str, object], None],
    ) -> None:
        has_videos = bool(rehearsal.on_cpu.answers.get("videos"))
        assert has_videos == (arch in WITH_VIDEOS and engine != "tight")
        equal, all_answers = rehearsal.equal_answers()
        waits = {
            where: sum(wait.times for wait in rehearsal.waits_of_ours(in_encoder=where))
            for where in (True, False)
        }
        row = (
            arch,
            "images, videos" if has_videos else "images",
            runner,
            {"tight": "native, little memory"}.get(engine, engine),
            f"{equal} of {all_answers}",
            str(waits[True]),
            str(waits[False]),
        )
        record_property(ROW, row)
        rehearsal.check_platform(runner)
        rehearsal.check_answers()

    def test_host_waits(self, rehearsal: Rehearsal, engine: str) -> None:
        rehearsal.check_waits(is_native=engine != COMPACT.name)

    def test_nothing_is_compiled_for_a_request(self, rehearsal: Rehearsal) -> None:
        rehearsal.check_compilation()

    def test_metrics(self, rehearsal: Rehearsal) -> None:
        rehearsal.check_metrics()

    def test_preemption(self, rehearsal: Rehearsal, engine: str) -> None:
        reports = (rehearsal.on_cpu, rehearsal.on_cuda)
        assert all((report.preemptions > 0) == (engine == "tight") for report in reports)

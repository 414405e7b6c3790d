# SPDX-License-Identifier: Apache-2.0
"""One process of a rehearsal: `python -m tests.rehearsal.program JOB REPORT`.

It runs on simulated CUDA if that is in its environment, else on vLLM's CPU platform.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from vllm import LLM
from vllm.platforms import current_platform

from anchorprune_vllm.metrics.families import ANCHOR_TOKENS, CACHE_HITS, CACHE_MISSES, SELECTIONS
from anchorprune_vllm.testing.demo_models.make import find_text_encoder
from tests.rehearsal.host_waits import summed_up
from tests.rehearsal.job import Engine, Job
from tests.rehearsal.report import EngineReport, Metrics, write_reports
from tests.rehearsal.steps import SIZES, STEPS, chat
from tests.simcuda.triton_forms import launched_forms
from tests.simcuda.waits import Wait, recorded_waits
from tests.support.pictures import QUESTIONS, picture
from tests.support.plain_vllm import takes_videos
from tests.support.scrapes import Scrape

BUDGET = 16
# vLLM profiles with items of these sizes: Triton's interpreter would take minutes for the largest.
LIMITS = {
    "image": {"count": 3, "width": 168, "height": 168},
    "video": {"count": 1, "width": 168, "height": 168, "num_frames": 4},
}


def run(job: Job) -> dict[str, EngineReport]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(job.in_own_process))
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker
    return {engine.name: run_engine(Path(job.model), engine) for engine in job.engines}


def run_engine(model: Path, engine: Engine) -> EngineReport:
    llm = start(model, engine)
    (facts,) = llm.collective_rpc(describe_worker)
    report = EngineReport(platform=current_platform.device_type, **facts)
    report.kernels = sorted(launched_forms)
    with waits_on_a_device() as waits:
        for step in engine.steps:
            report.answers[step] = STEPS[step](llm, model)
        # On CUDA what the device counts is known when it is next asked.
        report.metrics.append(our_metrics(engine))
        report.answers["last"] = [chat(llm, None, picture(99, SIZES[0]), QUESTIONS[7])]
        report.metrics.append(our_metrics(engine))
    report.waits = summed_up(waits)
    report.late_kernels = sorted(launched_forms - set(report.kernels))
    report.preemptions = sum(
        metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )
    llm.llm_engine.engine_core.shutdown()
    return report


def start(model: Path, engine: Engine) -> LLM:
    prune = {"budget": BUDGET, **engine.settings}
    if text_encoder := find_text_encoder(model):
        prune["text_encoder"] = str(text_encoder)
    limits = LIMITS if takes_videos(model) else {"image": LIMITS["image"]}
    options: dict[str, Any] = {
        "hf_overrides": {"anchorprune": prune},
        "served_model_name": engine.name,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 64,  # chunks cut images
        "max_num_seqs": 16,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 * 2**20,
        "limit_mm_per_prompt": limits,
        "enable_mm_embeds": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    return LLM(model=str(model), **{**options, **engine.options})


def describe_worker(worker: Any) -> dict[str, str]:
    runner = worker.model_runner
    return {
        "worker": full_name(getattr(worker, "worker", worker)),
        "runner": full_name(runner),
        "device": str(next(runner.model.parameters()).device),
    }


def full_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


@contextmanager
def waits_on_a_device() -> Iterator[list[Wait]]:
    """The host waits for nobody on a CPU."""
    if current_platform.is_cpu():
        yield []
        return
    with recorded_waits() as waits:
        yield waits


def our_metrics(engine: Engine) -> Metrics:
    scrape = Scrape.of(REGISTRY)
    figures = {"selections": SELECTIONS, "hits": CACHE_HITS, "misses": CACHE_MISSES}
    found = {what: scrape.value(family, model_name=engine.name) for what, family in figures.items()}
    if engine.settings.get("method", "anchorprune") == "anchorprune":
        for what in ("count", "sum"):
            found[f"anchors {what}"] = scrape.value(
                f"{ANCHOR_TOKENS.name}_{what}", model_name=engine.name
            )
    return found


if __name__ == "__main__":
    job, out = map(Path, sys.argv[1:])
    write_reports(run(Job.of_text(job.read_text())), out)

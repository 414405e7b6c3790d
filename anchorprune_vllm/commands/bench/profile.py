# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench profile`: where the time of one request goes, up to its first token.

Engines in this process, no server: the stages are those of `vllm serve` without HTTP and without
the way from one process to the other. On a CPU, all engines are there at once and are asked in
turns: whatever slows the machine down meets all alike. A GPU's memory holds one at a time.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from vllm import LLM, EngineArgs, SamplingParams
from vllm.multimodal.processing.context import InputProcessingContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

import anchorprune_vllm
from anchorprune_vllm.commands.bench.contenders import FREE, Contender, contenders
from anchorprune_vllm.commands.bench.noise import noise
from anchorprune_vllm.commands.bench.questions import question
from anchorprune_vllm.commands.bench.serve import machine
from anchorprune_vllm.commands.bench.served import ServedModel
from anchorprune_vllm.commands.bench.stage_clock import StageClock
from anchorprune_vllm.commands.chosen_methods import Method
from anchorprune_vllm.commands.results_file import write_json

_PIXELS = "resize and normalise (HF processor)"
_PROMPT = "identity, question, placeholders"
_TOWER = "vision tower and projector"
_SIGNALS = "question's text encoder, relevance"
_SELECTION = "selection"
_PREFILL = "language model"
_REST = "the rest: decoding the picture, template, scheduling, sampling"
STAGES = (_PIXELS, _PROMPT, _TOWER, _SIGNALS, _SELECTION, _PREFILL, _REST)
ALL = "all"

_WARM_UPS = 3
_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


@dataclass(frozen=True)
class Profile:
    """The requests of one engine, one at a time."""

    name: str
    budget: str | None
    prompt_tokens: int
    milliseconds: dict[str, float]
    """Of a request, by stage and in all: medians."""


def run_profile(
    model: ServedModel,
    methods: Sequence[Method],
    budgets: Sequence[str],
    requests: int,
    out: Path,
    command: str,
) -> list[Profile]:
    """Profile unpruned, free selection and each method; print a table, write profile.json."""
    console = Console()
    compared = contenders(methods, budgets, with_vllm=False)
    console.print(f"[bold]Model[/bold]  {model.name}", *model.notes, sep="\n")
    at_once = [[one] for one in compared] if torch.cuda.is_available() else [compared]
    found: list[Profile] = []
    for group in at_once:
        with console.status(f"{', '.join(map(str, group))}: {requests} requests each"):
            found += _profile(model, group, requests)
    console.print(_table(found, model))
    content = {
        "command": command,
        "model": model.name,
        "machine": machine(),
        "profiles": [asdict(profile) for profile in found],
    }
    write_json(out / "profile.json", content, indent=1)
    return found


def _profile(model: ServedModel, compared: Sequence[Contender], requests: int) -> list[Profile]:
    """Engines that are there at once, asked in turns."""
    clock = StageClock()
    found: list[list[dict[str, float]]] = [[] for _ in compared]
    tokens = [0] * len(compared)
    with ExitStack() as running:
        engines = [running.enter_context(_engine(model, contender)) for contender in compared]
        for llm in engines:
            running.enter_context(_stages_of(llm, clock))
        timed = clock.timed(InputProcessingContext.call_hf_processor, _PIXELS)
        running.enter_context(patch.object(InputProcessingContext, "call_hf_processor", timed))
        for number in range(_WARM_UPS + requests):
            part = noise(model.media, number).as_message_part()
            content = [part, {"type": "text", "text": question(number)}]
            message: Any = [{"role": "user", "content": content}]
            for place, llm in enumerate(engines):
                with clock.timing(_REST):
                    (output,) = llm.chat(message, _ONE_TOKEN, use_tqdm=False)
                found[place].append(clock.take())
                tokens[place] = len(output.prompt_token_ids or ())
    return [
        Profile(str(contender), contender.budget, prompt, _medians(seconds[_WARM_UPS:]))
        for contender, prompt, seconds in zip(compared, tokens, found, strict=True)
    ]


def _medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Milliseconds."""
    medians = {
        stage: 1000 * statistics.median(seconds.get(stage, 0.0) for seconds in found)
        for stage in STAGES
    }
    return {**medians, ALL: 1000 * statistics.median(sum(seconds.values()) for seconds in found)}


@contextmanager
def _engine(model: ServedModel, contender: Contender) -> Iterator[LLM]:
    """With the flags that a server would have."""
    anchorprune_vllm.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", model.path, *model.flags, *contender.flags(model.text_encoder)]
    if not torch.cuda.is_available():
        # Not all memory for one of them, and no cores of its own that the others could not use.
        flags += ["--kv-cache-memory-bytes", "512M"]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options = EngineArgs.from_cli_args(parser.parse_args(flags))
    gc.collect()  # the engine before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0"):
        llm = LLM.from_engine_args(options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def _stages_of(llm: LLM, clock: StageClock) -> Iterator[None]:
    """The stages of an engine report to the clock."""
    with ExitStack() as patched:

        def time(owner: Any, name: str, stage: str) -> None:
            timed = clock.timed(getattr(owner, name), stage)
            patched.enter_context(patch.object(owner, name, timed))

        time(llm.llm_engine.renderer.get_mm_processor(), "apply", _PROMPT)
        (model,) = llm.collective_rpc(lambda worker: worker.model_runner.get_model())
        time(model, "embed_multimodal", _TOWER)
        time(model, "forward", _PREFILL)
        if pruner := getattr(model, "_pruner", None):
            time(pruner, "_candidates", _SIGNALS)
            method = replace(pruner._method, select=clock.timed(pruner._method.select, _SELECTION))
            patched.enter_context(patch.object(pruner, "_method", method))
        yield


def _table(found: Sequence[Profile], model: ServedModel) -> Table:
    table = Table(title=f"{model.name}: one request up to its first token, ms ({machine()})")
    table.add_column("stage")
    for profile in found:
        table.add_column(profile.name, justify="right")
    table.add_row("prompt tokens", *(str(profile.prompt_tokens) for profile in found))
    for stage in (*STAGES, ALL):
        table.add_row(
            stage,
            *(_shown(profile.milliseconds[stage]) for profile in found),
            end_section=stage == _REST,
        )
    whole = {profile.name: profile.milliseconds[ALL] for profile in found}
    unpruned = found[0].milliseconds[ALL]
    table.add_row("speed-up", *(f"{unpruned / spent:.2f}x" for spent in whole.values()))
    free = [whole.get(str(Contender(FREE, profile.budget))) for profile in found]
    shares = [each and each / spent for each, spent in zip(free, whole.values(), strict=True)]
    table.add_row("of free selection's", *("–" if s is None else f"{s:.1%}" for s in shares))
    return table


def _shown(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds else "–"

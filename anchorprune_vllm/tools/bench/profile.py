# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench profile`: where the time of one request goes, up to its first token.

One engine in this process, no server: the stages are those of `vllm serve` without HTTP and without
the way from one process to the other.
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
from anchorprune_vllm.tools.bench.contenders import Contender, contenders
from anchorprune_vllm.tools.bench.noise import noise
from anchorprune_vllm.tools.bench.questions import question
from anchorprune_vllm.tools.bench.serve import machine
from anchorprune_vllm.tools.bench.served import ServedModel
from anchorprune_vllm.tools.bench.stage_clock import StageClock
from anchorprune_vllm.tools.chosen_methods import Method
from anchorprune_vllm.tools.results_file import write_json

_PIXELS = "resize and normalise (HF processor)"
_PROMPT = "identity, question, placeholders"
_TOWER = "vision tower and projector"
_SIGNALS = "question's text encoder, relevance"
_SELECTION = "selection"
_PREFILL = "language model"
_REST = "the rest: decoding the picture, template, scheduling, sampling"
STAGES = (_PIXELS, _PROMPT, _TOWER, _SIGNALS, _SELECTION, _PREFILL, _REST)

_WARM_UPS = 3
_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


@dataclass(frozen=True)
class Profile:
    """The requests of one engine, one at a time."""

    name: str
    prompt_tokens: int
    milliseconds: dict[str, float]
    """Of a request, by stage: medians."""


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
    found = []
    for contender in compared:
        with console.status(f"{contender}: {requests} requests"):
            found.append(_profile(model, contender, requests))
    console.print(_table(found, model))
    content = {
        "command": command,
        "model": model.name,
        "machine": machine(),
        "profiles": [asdict(profile) for profile in found],
    }
    write_json(out / "profile.json", content, indent=1)
    return found


def _profile(model: ServedModel, contender: Contender, requests: int) -> Profile:
    found: list[dict[str, float]] = []
    with _engine(model, contender) as llm, _stages(llm) as clock:
        for number in range(_WARM_UPS + requests):
            part = noise(model.media, number).as_message_part()
            content = [part, {"type": "text", "text": question(number)}]
            clock.take()
            with clock.timing(_REST):
                message: Any = [{"role": "user", "content": content}]
                (output,) = llm.chat(message, _ONE_TOKEN, use_tqdm=False)
            if number >= _WARM_UPS:
                found.append(clock.take())
    medians = {
        stage: 1000 * statistics.median(seconds.get(stage, 0.0) for seconds in found)
        for stage in STAGES
    }
    return Profile(str(contender), len(output.prompt_token_ids or ()), medians)


@contextmanager
def _engine(model: ServedModel, contender: Contender) -> Iterator[LLM]:
    """With the flags that a server would have."""
    anchorprune_vllm.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", model.path, *model.flags, *contender.flags(model.text_encoder)]
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
def _stages(llm: LLM) -> Iterator[StageClock]:
    """A clock that the engine's stages report to."""
    clock = StageClock()
    with ExitStack() as patched:

        def time(owner: Any, name: str, stage: str) -> None:
            timed = clock.timed(getattr(owner, name), stage)
            patched.enter_context(patch.object(owner, name, timed))

        time(InputProcessingContext, "call_hf_processor", _PIXELS)
        time(llm.llm_engine.renderer.get_mm_processor(), "apply", _PROMPT)
        (model,) = llm.collective_rpc(lambda worker: worker.model_runner.get_model())
        time(model, "embed_multimodal", _TOWER)
        time(model, "forward", _PREFILL)
        if pruner := getattr(model, "_pruner", None):
            time(pruner, "_candidates", _SIGNALS)
            method = replace(pruner._method, select=clock.timed(pruner._method.select, _SELECTION))
            patched.enter_context(patch.object(pruner, "_method", method))
        yield clock


def _table(found: Sequence[Profile], model: ServedModel) -> Table:
    table = Table(title=f"{model.name}: one request up to its first token, ms ({machine()})")
    table.add_column("stage")
    for profile in found:
        table.add_column(profile.name, justify="right")
    table.add_row("prompt tokens", *(str(profile.prompt_tokens) for profile in found))
    for stage in STAGES:
        table.add_row(stage, *(_shown(profile.milliseconds[stage]) for profile in found))
    table.add_section()
    table.add_row("all", *(_shown(sum(profile.milliseconds.values())) for profile in found))
    return table


def _shown(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds else "–"

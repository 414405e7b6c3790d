# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench profile`: where the time of one request goes, up to its first token.

The engines run in this process: the stages are those of `vllm serve` without HTTP and without the
messages between its processes. On a CPU all engines are there at once and take turns, so that
whatever slows the machine down affects all of them alike. A GPU's memory holds one at a time.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from vllm import LLM, EngineArgs, SamplingParams
from vllm.multimodal.processing.context import InputProcessingContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

import anchorprune_vllm
from anchorprune_vllm.commands.bench.contenders import FREE, Contender, contenders
from anchorprune_vllm.commands.bench.measure import StageClock, machine, table
from anchorprune_vllm.commands.bench.questions import question
from anchorprune_vllm.commands.bench.served import Comparison, ServedModel, noise

_PIXELS = "resize and normalise (HF processor)"
_PROMPT = "identity, question, placeholders"
_TOWER = "vision tower and projector"
_SIGNALS = "question's text encoder, relevance"
_SELECTION = "selection"
_PREFILL = "language model"
_REST = "the rest: decoding the image, template, scheduling, sampling"
_ALL = "all"
_STAGES = (_PIXELS, _PROMPT, _TOWER, _SIGNALS, _SELECTION, _PREFILL, _REST)

_WARM_UPS = 3
_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


class Profile(BaseModel):
    """The requests of one engine, one at a time."""

    name: str
    budget: str | None
    prompt_tokens: int
    milliseconds: dict[str, float]  # of a request, by stage and in all: medians


def run_profile(wanted: Comparison, requests: int) -> list[Profile]:
    """Profile unpruned, free selection and each method; print a table, write profile.json."""
    console = Console()
    compared = contenders(wanted.methods, wanted.budgets)
    wanted.print_model(console)
    groups = [[each] for each in compared] if torch.cuda.is_available() else [compared]
    found: list[Profile] = []
    for group in groups:
        with console.status(f"{', '.join(map(str, group))}: {requests} requests each"):
            found += _profile(wanted.model, group, requests)
    title = f"{wanted.model.name}: one request up to its first token, ms ({machine()})"
    console.print(_table(title, found))
    wanted.write("profile.json", profiles=[profile.model_dump() for profile in found])
    return found


def _profile(model: ServedModel, group: Sequence[Contender], requests: int) -> list[Profile]:
    """Profile engines that are there at once and take turns."""
    clock = StageClock()
    seconds: dict[Contender, list[dict[str, float]]] = {contender: [] for contender in group}
    prompt_tokens: dict[Contender, int] = {}
    with ExitStack() as running:
        engines = {each: running.enter_context(_engine(model, each)) for each in group}
        for llm in engines.values():
            running.enter_context(_timed(llm, clock))
        running.enter_context(
            _timed_method(InputProcessingContext, "call_hf_processor", clock, _PIXELS)
        )
        for number in range(_WARM_UPS + requests):
            media = noise(model.media, number).as_message_part()
            content = [media, {"type": "text", "text": question(number)}]
            message: Any = [{"role": "user", "content": content}]
            for contender, llm in engines.items():
                with clock.timing(_REST):
                    (output,) = llm.chat(message, _ONE_TOKEN, use_tqdm=False)
                seconds[contender].append(clock.take())
                prompt_tokens[contender] = len(output.prompt_token_ids or ())
    return [
        Profile(
            name=str(contender),
            budget=contender.budget,
            prompt_tokens=prompt_tokens[contender],
            milliseconds=_medians(spent[_WARM_UPS:]),
        )
        for contender, spent in seconds.items()
    ]


def _medians(seconds: Sequence[dict[str, float]]) -> dict[str, float]:
    rows = [{**dict.fromkeys(_STAGES, 0.0), **row, _ALL: sum(row.values())} for row in seconds]
    return {name: 1000 * statistics.median(row[name] for row in rows) for name in rows[0]}


@contextmanager
def _engine(model: ServedModel, contender: Contender) -> Iterator[LLM]:
    """Start an engine with the flags that a server would have."""
    anchorprune_vllm.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", model.path, *model.flags, *contender.flags(model.text_encoder)]
    if not torch.cuda.is_available():
        # No engine may take all of the memory, or cores that the others could not use.
        flags += ["--kv-cache-memory-bytes", "512M"]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options = EngineArgs.from_cli_args(parser.parse_args(flags))
    gc.collect()  # free the engine before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0"):
        llm = LLM.from_engine_args(options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def _timed(llm: LLM, clock: StageClock) -> Iterator[None]:
    """Time the stages of an engine."""
    (model,) = llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    methods = [
        (llm.llm_engine.renderer.get_mm_processor(), "apply", _PROMPT),
        (model, "embed_multimodal", _TOWER),
        (model, "forward", _PREFILL),
    ]
    with ExitStack() as patched:
        if pruner := getattr(model, "_pruner", None):
            methods.append((pruner, "_candidates", _SIGNALS))
            select = clock.timing(_SELECTION)(pruner._method.select)
            method = replace(pruner._method, select=select)
            patched.enter_context(patch.object(pruner, "_method", method))
        for owner, name, stage in methods:
            patched.enter_context(_timed_method(owner, name, clock, stage))
        yield


def _timed_method(owner: Any, name: str, clock: StageClock, stage: str) -> Any:
    return patch.object(owner, name, clock.timing(stage)(getattr(owner, name)))


def _table(title: str, found: Sequence[Profile]) -> Table:
    def row(stage: str) -> list[str]:
        times = [profile.milliseconds[stage] for profile in found]
        return [stage, *(f"{time:.1f}" if time else "–" for time in times)]

    prompts = ["prompt tokens", *(str(profile.prompt_tokens) for profile in found)]
    columns = ["stage", *(profile.name for profile in found)]
    made = table(title, columns, [prompts, *map(row, _STAGES)])
    made.add_section()
    made.add_row(*row(_ALL))
    whole = {profile.name: profile.milliseconds[_ALL] for profile in found}
    unpruned = found[0].milliseconds[_ALL]
    made.add_row("speed-up", *(f"{unpruned / spent:.2f}x" for spent in whole.values()))
    shares = []
    for profile in found:
        free = whole.get(str(Contender(FREE, profile.budget)))
        shares.append(f"{free / whole[profile.name]:.1%}" if free else "–")
    made.add_row("of free selection's", *shares)
    return made

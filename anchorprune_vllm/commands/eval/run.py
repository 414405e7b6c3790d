# SPDX-License-Identifier: Apache-2.0
"""Runs an evaluation: one engine after the other, each asked what is not in the results yet."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anchorprune_vllm.commands.checks import check_model, check_out, check_plot
from anchorprune_vllm.commands.chosen_methods import ChosenMethod
from anchorprune_vllm.commands.eval import report
from anchorprune_vllm.commands.eval.data import DataSet, blind_guesses, load_data
from anchorprune_vllm.commands.eval.plan import (
    BLIND,
    PERFECT,
    Configuration,
    EngineRuns,
    engine_runs,
)
from anchorprune_vllm.commands.eval.results import RESULTS_FILE, EvalResults, Run
from anchorprune_vllm.testing.demo_models.make import find_text_encoder

_PACKAGES = ("anchorprune-vllm", "vllm", "torch", "transformers")


@dataclass(frozen=True)
class Evaluation:
    """What is to be measured, with names and defaults as on the command line."""

    model: str
    out: Path
    data: Sequence[str] = ("easy-vqa",)
    methods: Sequence[ChosenMethod] = (ChosenMethod("anchorprune"),)
    budgets: Sequence[str] = ("5.6%", "11.1%", "22.2%")
    query: Sequence[str] = ("turn",)
    positions: Sequence[str | None] = (None,)
    limit: int | None = 2000
    text_encoder: str | None = None
    max_tokens: int = 16
    prompt: str = "{question}"
    ceiling: bool = False
    add_special_tokens: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    """The command line, which is kept with the results."""


def run_eval(wanted: Evaluation) -> EvalResults:
    """Run what is not in the results yet; write and print tables and a plot of all results."""
    console = Console()
    data, text_encoder = _checked(wanted)

    from vllm.platforms import current_platform

    from anchorprune_vllm.commands.eval.engine import check_engine

    directories = (wanted.model, text_encoder)
    settings = {
        "model": wanted.model,
        "model_files": [name and _identity(Path(name), wanted.out) for name in directories],
        "data": [part.name for part in data],
        "questions": {part.name: part.fingerprint() for part in data},
        "limit": wanted.limit,
        "max_tokens": wanted.max_tokens,
        "prompt": wanted.prompt,
        "add_special_tokens": wanted.add_special_tokens,
        "text_encoder": text_encoder,
        "engine_args": wanted.engine_args,
        "versions": {name: version(name) for name in _PACKAGES},
        "device": str(current_platform.get_device_name()),
    }
    results = EvalResults.open(wanted.out, settings, data)
    if wanted.command not in results.commands:
        results.commands.append(wanted.command)
    choices = (wanted.methods, wanted.budgets, wanted.query, wanted.positions)
    plan = list(engine_runs(*choices, text_encoder, wanted.ceiling))
    for engine in plan:
        check_engine(wanted.model, engine.settings, wanted.engine_args)
    results.runs += _blind_runs(results)  # written with the first run of an engine
    _run_engines(wanted, plan, results, console)

    (wanted.out / "table.md").write_text(report.markdown(results), encoding="utf-8")
    report.plot(results, wanted.out / "accuracy.png")
    for table in report.rich_tables(results):
        console.print(table)
    console.print(report.caption(results), highlight=False)
    console.print(f"Written: {wanted.out}/results.json, table.md, accuracy.png", highlight=False)
    return results


def _checked(wanted: Evaluation) -> tuple[list[DataSet], str | None]:
    """Return data and text encoder; raise whatever can be known to be wrong without an engine."""
    check_plot()
    check_out(wanted.out)
    if "{question}" not in wanted.prompt:
        raise ValueError(f"the prompt {wanted.prompt!r} has no {{question}} in it")
    check_model(wanted.model)
    text_encoder = wanted.text_encoder
    if text_encoder is not None:
        check_model(text_encoder, "text encoder")
    elif beside := find_text_encoder(Path(wanted.model)):
        text_encoder = str(beside)
    data = load_data(wanted.data, wanted.limit)
    if wanted.ceiling:
        if not any(part.knows_places for part in data):
            names = ", ".join(part.name for part in data)
            raise ValueError(
                f"--ceiling: {names} cannot tell where the things are that a question is about; "
                "give --data clutter"
            )
        # On a GPU, the function that tells the model about them goes to another process.
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    return data, text_encoder


def _run_engines(
    wanted: Evaluation, plan: Sequence[EngineRuns], results: EvalResults, console: Console
) -> None:
    """Start each engine that has runs missing, and add these to the results."""
    from anchorprune_vllm.commands.eval.engine import ask_all, start_engine

    asked = [(engine, _asked(engine, results.data)) for engine in plan]
    todo = [
        (engine, [(c, data) for c, data in runs if (c, data.name) not in results])
        for engine, runs in asked
    ]
    runs, left = (sum(len(runs) for _, runs in each) for each in (asked, todo))
    if left < runs:
        console.print(f"{runs - left} of {runs} runs are there already", highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("questions"), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        questions = sum(len(data.questions) for _, missing in todo for _, data in missing)
        bar = progress.add_task("", total=questions)
        for engine, missing in todo:
            if not missing:
                continue
            progress.update(bar, description=f"starting vLLM: {missing[0][0].method}")
            with start_engine(wanted.model, engine.settings, wanted.engine_args) as llm:
                for configuration, data in missing:
                    progress.update(bar, description=f"{configuration}: {data.name}")
                    start = time.perf_counter()
                    answers, prompt_tokens = ask_all(
                        llm,
                        data,
                        configuration,
                        prompt=wanted.prompt,
                        max_tokens=wanted.max_tokens,
                        add_special_tokens=wanted.add_special_tokens,
                        advance=lambda count: progress.advance(bar, count),
                    )
                    seconds = time.perf_counter() - start
                    costs = {"prompt_tokens": prompt_tokens, "seconds": seconds}
                    run = Run.of_answers(configuration, data, answers, **costs)
                    results.add(run)
                    low, high = run.interval
                    progress.console.print(
                        f"{configuration}: {run.data} {run.accuracy:.1%} "
                        f"[{low:.1%} to {high:.1%}], {seconds:.0f} s",
                        highlight=False,
                        soft_wrap=True,
                    )
        progress.update(bar, description="done")


def _asked(engine: EngineRuns, data: Sequence[DataSet]) -> list[tuple[Configuration, DataSet]]:
    """Return what an engine is asked: all data, or for perfect relevance what knows places."""
    return [
        (configuration, part)
        for configuration in engine.configurations
        for part in data
        if configuration.method != PERFECT or part.knows_places
    ]


def _blind_runs(results: EvalResults) -> list[Run]:
    """Guess without the image, where there is a training split to guess from."""
    configuration = Configuration(BLIND)
    runs = []
    for data in results.data:
        if (configuration, data.name) not in results and (guesses := blind_guesses(data.name)):
            answers = [guesses.get(question.text, "") for question in data.questions]
            runs.append(Run.of_answers(configuration, data, answers))
    return runs


def _identity(directory: Path, out: Path) -> str | None:
    """Return a hash of a local model's files, which training changes; None for one on the hub.

    Size and time stand for the content of large files, which would take long to read. The results
    do not count, although `out` may be the model's directory.
    """
    if not (directory / "config.json").is_file():
        return None
    found = hashlib.sha256()
    for path in sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")]):
        if path.resolve() == (out / RESULTS_FILE).resolve():
            continue
        size = path.stat().st_size
        content = path.read_bytes() if size <= 2**24 else str(path.stat().st_mtime_ns).encode()
        found.update(f"{path.name} {size} ".encode() + content)
    return found.hexdigest()[:16]

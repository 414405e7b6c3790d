# SPDX-License-Identifier: Apache-2.0
"""`anchorprune eval`: a VQA set through the real engine, at several budgets and with methods."""

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

from anchorprune_vllm.commands.checks import check_model, check_out
from anchorprune_vllm.commands.chosen_methods import Method
from anchorprune_vllm.commands.eval import report
from anchorprune_vllm.commands.eval.data import DataSet, blind_guesses, load_data
from anchorprune_vllm.commands.eval.plan import (
    BLIND,
    PERFECT,
    Configuration,
    EngineRuns,
    engine_runs,
)
from anchorprune_vllm.commands.eval.results import RESULTS_FILE, Results, Run
from anchorprune_vllm.testing.demo_models.make import find_text_encoder

_PACKAGES = ("anchorprune-vllm", "vllm", "torch", "transformers")


@dataclass(frozen=True)
class Evaluation:
    """What the command line asks for."""

    model: str
    out: Path
    data: Sequence[str] = ("easy-vqa",)
    methods: Sequence[Method] = (Method("anchorprune"),)
    budgets: Sequence[str] = ("5.6%", "11.1%", "22.2%")
    scopes: Sequence[str] = ("turn",)
    positions: Sequence[str | None] = (None,)
    """None: the model's own."""
    limit: int | None = 2000
    """Questions of each data set; None: all."""
    text_encoder: str | None = None
    max_tokens: int = 16
    prompt: str = "{question}"
    ceiling: bool = False
    """Whether AnchorPrune also runs with perfect relevance, on data that knows where things are."""
    add_special_tokens: bool = False
    """Whether the tokenizer's own are put before the chat, such as `<s>`; a server does not."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM`."""
    command: str = ""


def run_eval(wanted: Evaluation) -> Results:
    """Run what is not there yet, write the results, print them."""
    console = Console()
    # Whatever can be wrong is found before the first engine starts.
    report.check_plot()
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
        # A function tells the model about them, in the engine's own process on a GPU.
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

    from anchorprune_vllm.commands.eval.engine import check_engine, device_name

    settings = {
        "model": wanted.model,
        "model_files": [
            name and _identity(Path(name), wanted.out) for name in (wanted.model, text_encoder)
        ],
        "data": [part.name for part in data],
        "questions": {part.name: part.fingerprint() for part in data},
        "limit": wanted.limit,
        "max_tokens": wanted.max_tokens,
        "prompt": wanted.prompt,
        "add_special_tokens": wanted.add_special_tokens,
        "text_encoder": text_encoder,
        "engine_args": wanted.engine_args,
        "versions": {name: version(name) for name in _PACKAGES},
        "device": device_name(),
    }
    results = Results(wanted.out, settings, data)
    if wanted.command not in results.commands:
        results.commands.append(wanted.command)
    plan = list(
        engine_runs(
            wanted.methods,
            wanted.budgets,
            wanted.scopes,
            wanted.positions,
            text_encoder,
            wanted.ceiling,
        )
    )
    for engine in plan:
        check_engine(wanted.model, engine.settings, wanted.engine_args)
    results.runs += _blind_runs(results)
    _run_all(wanted, plan, results, console)

    (wanted.out / "table.md").write_text(report.markdown(results), encoding="utf-8")
    report.plot(results, wanted.out / "accuracy.png")
    for table in report.rich_tables(results):
        console.print(table)
    console.print(report.caption(results), highlight=False)
    console.print(f"Written: {wanted.out}/results.json, table.md, accuracy.png", highlight=False)
    return results


def _run_all(
    wanted: Evaluation, plan: Sequence[EngineRuns], results: Results, console: Console
) -> None:
    """One engine after the other; those with nothing left to do are not started."""
    from anchorprune_vllm.commands.eval.engine import ask, start_engine

    todo = []
    runs = left = 0
    for engine in plan:
        asked = _asked(engine, results.data)
        missing = [(each, data) for each, data in asked if (each, data.name) not in results]
        todo.append((engine, missing))
        runs += len(asked)
        left += len(missing)
    if left < runs:
        console.print(f"{runs - left} of {runs} runs are there already", highlight=False)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("questions"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
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
                    answers, prompt_tokens = ask(
                        llm,
                        data,
                        configuration,
                        prompt=wanted.prompt,
                        max_tokens=wanted.max_tokens,
                        add_special_tokens=wanted.add_special_tokens,
                        advance=lambda count: progress.advance(bar, count),
                    )
                    seconds = time.perf_counter() - start
                    run = Run.of_answers(configuration, data, answers, prompt_tokens, seconds)
                    results.add(run)
                    progress.console.print(_line(run), highlight=False, soft_wrap=True)
        progress.update(bar, description="done")


def _asked(engine: EngineRuns, data: Sequence[DataSet]) -> list[tuple[Configuration, DataSet]]:
    """Return what an engine is asked; perfect relevance wants data that knows where things are."""
    return [
        (configuration, part)
        for configuration in engine.configurations
        for part in data
        if configuration.method != PERFECT or part.knows_places
    ]


def _blind_runs(results: Results) -> list[Run]:
    """Guesses without the picture, where there is a training split to guess from."""
    configuration = Configuration(BLIND)
    runs = []
    for data in results.data:
        if (configuration, data.name) in results:
            continue
        guesses = blind_guesses(data.name)
        if guesses is not None:
            answers = [guesses.get(question.text, "") for question in data.questions]
            runs.append(Run.of_answers(configuration, data, answers))
    return runs


def _line(run: Run) -> str:
    score = run.score
    return (
        f"{run.configuration}: {run.data} {score.accuracy:.1%} "
        f"[{score.low:.1%} to {score.high:.1%}], {run.seconds:.0f} s"
    )


def _identity(directory: Path, out: Path) -> str | None:
    """Of a local model's files: one that is trained on is another. None if it is not local.

    Large files go by size and time, as reading them would take long. The results are no part of
    it, though `out` may be the model's directory.
    """
    if not (directory / "config.json").is_file():
        return None
    found = hashlib.sha256()
    results = (out / RESULTS_FILE).resolve()
    for path in sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")]):
        if path.resolve() == results:
            continue
        size = path.stat().st_size
        content = path.read_bytes() if size <= 2**24 else str(path.stat().st_mtime_ns).encode()
        found.update(f"{path.name} {size} ".encode() + content)
    return found.hexdigest()[:16]

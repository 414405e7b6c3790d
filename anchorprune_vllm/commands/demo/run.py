# SPDX-License-Identifier: Apache-2.0
"""Runs the demo: vLLM serves a tiny model, which is asked at several budgets and drawn at one."""

from __future__ import annotations

import base64
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from anchorprune_vllm.commands.asking import Answer, ask, connect
from anchorprune_vllm.commands.chosen_methods import ChosenMethod
from anchorprune_vllm.commands.demo.questions import DemoQuestion, questions_for
from anchorprune_vllm.commands.explain.drawing import as_text
from anchorprune_vllm.commands.explain.explanation import Panel
from anchorprune_vllm.testing.demo_models import make
from anchorprune_vllm.testing.server import VllmServer

_QUESTIONS = 40  # with known answers, the same for all budgets


def run_demo(directory: Path, arch: str, budgets: Sequence[str], images: int) -> None:
    """Make the model, serve it, ask it at each budget, print a table, and stop the server."""
    console = Console()
    is_trained = arch in make.TRAINED
    settings = make.TRAINED.get(arch, {})
    model = directory / (f"trained-{arch}" if is_trained else arch)
    if is_trained:
        make.make_trained_model(model, arch)
    else:
        make.make_demo_model(model, arch=arch)
    weights = "trained" if is_trained else "random weights: answers mean nothing"
    console.print(f"[bold]Model[/bold]   {make.describe(model)} ({weights})")
    server_budget = budgets[len(budgets) // 2]
    flags = [
        *("--anchorprune-budget", server_budget, *make.pruning_flags(model, settings)),
        "--trust-request-mm-kwargs",
        *("--served-model-name", "demo", "--dtype", "float32"),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", "128M", "--enforce-eager"),
    ]
    console.print(f"[bold]Server[/bold]  vllm serve {model} {shlex.join(flags)}", soft_wrap=True)
    log = directory / "server.log"
    with ExitStack() as running:
        drawing = None
        if is_trained:  # already now, because a starting server keeps only one core busy
            drawing = running.enter_context(
                Drawing(directory, model, questions_for(arch)(0), settings, server_budget)
            )
        with console.status(f"starting vLLM (about half a minute; log: {log})"):
            server = running.enter_context(VllmServer(model, flags, log))
        client = connect(server.url)
        console.print(_ask_at_budgets(client, arch, budgets, server_budget, images, console))
        if drawing is not None:
            with console.status("drawing what was kept"):
                console.print(drawing.finish(), highlight=False, markup=False, soft_wrap=True)
    console.print(
        "Server stopped. (Times of a model this small mean little: look at the prompt tokens.)"
    )


def _ask_at_budgets(
    client: OpenAI,
    arch: str,
    budgets: Sequence[str],
    server_budget: str,
    images: int,
    console: Console,
) -> Table:
    question = questions_for(arch)
    example = question(0)
    known = [question(-1 - number) for number in range(_QUESTIONS)] if example.answers else []
    kind = {"picture": "image", "clip": "video"}[example.media.kind]
    table = Table(title=f"Time to first token: median of {images} new {kind}s per budget")
    table.add_column("budget", no_wrap=True)
    table.add_column("prompt tokens", justify="right")
    table.add_column("time to first token", justify="right")
    if known:
        table.add_column(f"right answers of {len(known)}", justify="right")
    expected = f" (expected: {example.answers[0]})" if known else ""
    table.add_column(example.text + expected)

    def put(asked: DemoQuestion, budget: str) -> Answer:
        override = None if budget == server_budget else budget
        return ask(client, asked.media, asked.text, model="demo", budget=override)

    with console.status("asking") as status:
        for budget in (server_budget, "100%"):  # the first requests pay for lazy initialisation
            put(question(10**6), budget)
        for number, budget in enumerate(budgets):
            status.update(f"asking at budget {budget}")
            # Images that no other budget has seen, so that each pays for its vision tower.
            new = range(1 + number * images, 1 + (number + 1) * images)
            seconds = [put(question(each), budget).seconds_to_first_token for each in new]
            answer = put(example, budget)
            right = sum(asked.is_right(put(asked, budget).text) for asked in known)
            note = {server_budget: " (server)", "100%": " (unpruned)"}.get(budget, "")
            table.add_row(
                budget + note,
                str(answer.prompt_tokens),
                f"{1000 * statistics.median(seconds):.0f} ms",
                *([str(right)] if known else []),
                answer.text.strip(),
            )
    return table


class Drawing:
    """`anchorprune explain` in a process of its own, which ends with the block at the latest."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        asked: DemoQuestion,
        settings: Mapping[str, Any],
        budget: str,
    ) -> None:
        self._path = directory / "example"
        self._asked, self._budget = asked, budget
        method = ChosenMethod("anchorprune", tuple(settings.items()))
        image = str(self._path.with_suffix(".png"))
        self._command = ["explain", str(model), image, asked.text]
        self._command += ["--methods", str(method), "--budgets", budget]
        for flag, suffix in (("--out", ".html"), ("--json", ".json")):
            self._command += [flag, str(self._path.with_suffix(suffix))]

    def __enter__(self) -> Drawing:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        image = base64.b64decode(self._asked.media.url.partition(",")[2])
        self._path.with_suffix(".png").write_bytes(image)
        with self._path.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "anchorprune_vllm.commands.main", *self._command],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def finish(self) -> str:
        """Return a drawing in text, and the path of the page that shows it on the image."""
        if self._process.wait() != 0:
            return f"The example could not be drawn: see {self._path.with_suffix('.log')}"
        found = json.loads(self._path.with_suffix(".json").read_text(encoding="utf-8"))
        (unit,), (method,) = found["view"]["units"], found["methods"]
        drawn = as_text(unit["tokens"], Panel(**method["panels"][0]))
        return (
            f"Kept for {self._asked.text!r} at budget {self._budget}: {drawn}\n\n"
            f"The same on the image itself: {self._path.with_suffix('.html')}"
        )

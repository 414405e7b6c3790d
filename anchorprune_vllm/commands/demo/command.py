# SPDX-License-Identifier: Apache-2.0
"""`anchorprune demo`: the real engine serves a small model, asked at several budgets."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from anchorprune_vllm.commands.asking import Answer, ask, connect
from anchorprune_vllm.commands.chosen_methods import Method
from anchorprune_vllm.commands.demo.drawing import Drawing
from anchorprune_vllm.commands.demo.questions import DemoQuestion, questions_for
from anchorprune_vllm.testing.demo_models.make import (
    TRAINED,
    describe,
    make_demo_model,
    make_trained_model,
    pruning_flags,
)
from anchorprune_vllm.testing.server import VllmServer

_SAME_FOR_ALL = 40  # questions that every budget answers


def run_demo(
    directory: Path, arch: str, budgets: Sequence[str], server_budget: str, images: int
) -> None:
    """Make the model, serve it, ask at each budget, print a table, stop the server."""
    console = Console()
    is_trained = arch in TRAINED
    model = directory / (f"trained-{arch}" if is_trained else arch)
    if is_trained:
        make_trained_model(model, arch)
    else:
        make_demo_model(model, arch=arch)
    weights = "trained" if is_trained else "random weights: answers mean nothing"
    console.print(f"[bold]Model[/bold]   {describe(model)} ({weights})")
    settings = TRAINED.get(arch, {})
    flags = [
        *("--anchorprune-budget", server_budget, *pruning_flags(model, settings)),
        "--trust-request-mm-kwargs",
        *("--served-model-name", "demo", "--dtype", "float32"),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", "128M", "--enforce-eager"),
    ]
    console.print(f"[bold]Server[/bold]  vllm serve {model} {shlex.join(flags)}", soft_wrap=True)
    log = directory / "server.log"
    question = questions_for(arch)
    with ExitStack() as running:
        drawing = None
        if is_trained:  # now, as a server that starts keeps only one core busy
            method = Method("anchorprune", tuple(settings.items()))
            drawing = running.enter_context(
                Drawing(directory, model, question(0), method, server_budget)
            )
        with console.status(f"starting vLLM (about half a minute; log: {log})"):
            server = running.enter_context(VllmServer(model, flags, log))
        console.print(_ask_at_budgets(server, question, budgets, server_budget, images, console))
        if drawing is not None:
            with console.status("drawing what was kept"):
                console.print(drawing.finish(), highlight=False, markup=False, soft_wrap=True)
    console.print(
        "Server stopped. (So small a model is as fast unpruned: look at the prompt tokens.)"
    )


def _ask_at_budgets(
    server: VllmServer,
    question: Callable[[int], DemoQuestion],
    budgets: Sequence[str],
    server_budget: str,
    images: int,
    console: Console,
) -> Table:
    client = connect(server.url)

    def put(asked: DemoQuestion, budget: str | None) -> Answer:
        return ask(client, asked.media, asked.text, model="demo", budget=budget)

    example = question(0)
    kind, is_exam = example.media.kind, bool(example.answers)
    same = [question(-1 - number) for number in range(_SAME_FOR_ALL if is_exam else 0)]
    table = Table(title=f"Time over {images} new {kind}s per budget")
    table.add_column("budget", no_wrap=True)
    table.add_column("prompt tokens", justify="right")
    table.add_column("time to first token (median)", justify="right")
    if is_exam:
        table.add_column(f"right answers of {len(same)}", justify="right")
    rightly = f" (rightly: {example.answers[0]})" if is_exam else ""
    table.add_column(example.text + rightly)
    notes = {server_budget: " (server)", "100%": " (unpruned)"}
    with console.status("asking") as status:
        # The first requests of all pay for lazy initialisation.
        for budget in (None, "100%"):
            put(question(10**6), budget)
        for number, budget in enumerate(budgets):
            status.update(f"asking at budget {budget}")
            override = None if budget == server_budget else budget
            # Timed on pictures that no other budget has seen: each pays for its vision tower.
            first = 1 + number * images
            seconds = [
                put(question(new), override).seconds_to_first_token
                for new in range(first, first + images)
            ]
            answer = put(example, override)
            right = sum(asked.is_right(put(asked, override).text) for asked in same)
            table.add_row(
                budget + notes.get(budget, ""),
                str(answer.prompt_tokens),
                f"{1000 * statistics.median(seconds):.0f} ms",
                *([str(right)] if is_exam else []),
                answer.text.strip(),
            )
    return table

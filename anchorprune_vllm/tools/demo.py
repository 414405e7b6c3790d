# SPDX-License-Identifier: Apache-2.0
"""`anchorprune demo`: the real engine serves a small model, asked at several budgets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from anchorprune_vllm.tools.asking import Answer, ask, connect
from anchorprune_vllm.tools.demo_model import (
    TRAINED,
    describe,
    find_text_encoder,
    make_demo_model,
)
from anchorprune_vllm.tools.demo_questions import DemoQuestion, questions_for
from anchorprune_vllm.tools.server import VllmServer

_SAME_FOR_ALL = 40  # questions that every budget answers


def run_demo(
    directory: Path, arch: str, budgets: Sequence[str], server_budget: str, images: int
) -> None:
    """Make the model, serve it, ask at each budget, print a table, stop the server."""
    console = Console()
    model = directory / arch
    make_demo_model(model, arch=arch)
    weights = "trained" if arch == TRAINED else "random weights: answers mean nothing"
    console.print(f"[bold]Model[/bold]   {describe(model)} ({weights})")
    text_encoder = find_text_encoder(model)
    flags = [
        *("--anchorprune-budget", server_budget),
        *(["--anchorprune-text-encoder", str(text_encoder)] if text_encoder else []),
        "--trust-request-mm-kwargs",
        *("--served-model-name", "demo", "--dtype", "float32"),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", "128M", "--enforce-eager"),
    ]
    console.print(f"[bold]Server[/bold]  vllm serve {model} {' '.join(flags)}", soft_wrap=True)
    log = directory / "server.log"
    with ExitStack() as running:
        with console.status(f"starting vLLM (about half a minute; log: {log})"):
            server = running.enter_context(VllmServer(model, flags, log))
        question = questions_for(arch)
        console.print(_ask_at_budgets(server, question, budgets, server_budget, images, console))
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

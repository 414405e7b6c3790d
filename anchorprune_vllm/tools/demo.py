# SPDX-License-Identifier: Apache-2.0
"""`anchorprune demo`: the real engine serves a small model, asked at several budgets."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import DefaultHttpxClient, OpenAI
from rich.console import Console
from rich.table import Table

from anchorprune_vllm.tools.demo_model import (
    TRAINED,
    describe,
    find_text_encoder,
    make_demo_model,
)
from anchorprune_vllm.tools.demo_questions import DemoQuestion, questions_for
from anchorprune_vllm.tools.server import VllmServer

_SAME_FOR_ALL = 40  # questions that every budget answers


@dataclass(frozen=True)
class Answer:
    """What a client sees of one streamed answer."""

    prompt_tokens: int
    seconds_to_first_token: float
    text: str


def run_demo(
    directory: Path, arch: str, budgets: Sequence[str], server_budget: str, images: int
) -> None:
    """Make the model, serve it, ask at each budget, print a table, stop the server."""
    # `kill` ends the demo as Ctrl-C does, with its server; a shell's background jobs ignore Ctrl-C.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
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
    client = OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=DefaultHttpxClient(trust_env=False),  # no proxy between us and this machine
    )
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
            ask(client, question(10**6), budget)
        for number, budget in enumerate(budgets):
            status.update(f"asking at budget {budget}")
            override = None if budget == server_budget else budget
            # Timed on pictures that no other budget has seen: each pays for its vision tower.
            first = 1 + number * images
            seconds = [
                ask(client, question(new), override).seconds_to_first_token
                for new in range(first, first + images)
            ]
            answer = ask(client, example, override)
            right = sum(asked.is_right(ask(client, asked, override).text) for asked in same)
            table.add_row(
                budget + notes.get(budget, ""),
                str(answer.prompt_tokens),
                f"{1000 * statistics.median(seconds):.0f} ms",
                *([str(right)] if is_exam else []),
                answer.text.strip(),
            )
    return table


def ask(client: OpenAI, asked: DemoQuestion, budget: str | None) -> Answer:
    """One streamed question; `budget` overrides the server's."""
    override: dict[str, Any] = {} if budget is None else {"anchorprune": {"budget": budget}}
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model="demo",
        messages=[
            {
                "role": "user",
                "content": [
                    asked.media.as_message_part(),
                    {"type": "text", "text": asked.text},
                ],
            }
        ],
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"mm_processor_kwargs": override} if override else None,
    )
    first, text, prompt_tokens = None, "", 0
    for chunk in stream:
        if chunk.usage is not None:
            prompt_tokens = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            if choice.delta.content and first is None:
                first = time.perf_counter()
            text += choice.delta.content or ""
    return Answer(prompt_tokens, (first or time.perf_counter()) - start, text)

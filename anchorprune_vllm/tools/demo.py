# SPDX-License-Identifier: Apache-2.0
"""`anchorprune demo`: the real engine serves a small LLaVA, asked at several budgets."""

from __future__ import annotations

import base64
import io
import random
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import DefaultHttpxClient, OpenAI
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from anchorprune_vllm.tools.demo_model import describe, make_demo_model
from anchorprune_vllm.tools.server import VllmServer

QUESTION = "What is in the picture?"
_COLOURS = ("crimson", "gold", "seagreen", "royalblue", "orchid")


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
    console.print(f"[bold]Model[/bold]   {describe(model)} (random weights: answers mean nothing)")
    clip = model / "clip"
    flags = [
        *("--anchorprune-budget", server_budget),
        *(["--anchorprune-text-encoder", str(clip)] if clip.exists() else []),
        "--trust-request-mm-kwargs",
        *("--served-model-name", "demo", "--dtype", "float32"),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", "128M", "--enforce-eager"),
    ]
    console.print(f"[bold]Server[/bold]  vllm serve {model} {' '.join(flags)}", soft_wrap=True)
    log = directory / "server.log"
    with ExitStack() as running:
        with console.status(f"starting vLLM (about half a minute; log: {log})"):
            server = running.enter_context(VllmServer(model, flags, log))
        console.print(_ask_at_budgets(server, budgets, server_budget, images, console))
    console.print(
        "Server stopped. (So small a model is as fast unpruned: look at the prompt tokens.)"
    )


def _ask_at_budgets(
    server: VllmServer, budgets: Sequence[str], server_budget: str, images: int, console: Console
) -> Table:
    client = OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=DefaultHttpxClient(trust_env=False),  # no proxy between us and this machine
    )
    table = Table(title=f"{QUESTION!r}, time over {images} new pictures per budget")
    table.add_column("budget")
    table.add_column("prompt tokens", justify="right")
    table.add_column("time to first token (median)", justify="right")
    table.add_column("answer about one and the same picture")
    notes = {server_budget: " (server)", "100%": " (unpruned)"}
    with console.status("asking") as status:
        # The first requests of all pay for lazy initialisation.
        for budget in (None, "100%"):
            ask(client, draw_picture(seed=-1), budget)
        for number, budget in enumerate(budgets):
            status.update(f"asking at budget {budget}")
            override = None if budget == server_budget else budget
            # Timed on pictures that no other budget has seen: each pays for its vision tower.
            first_seed = 1 + number * images
            seconds = [
                ask(client, draw_picture(seed), override).seconds_to_first_token
                for seed in range(first_seed, first_seed + images)
            ]
            answer = ask(client, draw_picture(seed=0), override)
            table.add_row(
                budget + notes.get(budget, ""),
                str(answer.prompt_tokens),
                f"{1000 * statistics.median(seconds):.0f} ms",
                answer.text.strip(),
            )
    return table


def ask(client: OpenAI, picture: Image.Image, budget: str | None) -> Answer:
    """One streamed question; `budget` overrides the server's."""
    override: dict[str, Any] = {} if budget is None else {"anchorprune": {"budget": budget}}
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model="demo",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": as_data_url(picture)}},
                    {"type": "text", "text": QUESTION},
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


def draw_picture(seed: int) -> Image.Image:
    """A few coloured shapes on a plain ground."""
    rng = random.Random(seed)
    picture = Image.new("RGB", (336, 336), "white")
    draw = ImageDraw.Draw(picture)
    for _ in range(3):
        x, y, size = rng.randrange(240), rng.randrange(240), rng.randrange(40, 96)
        shape = rng.choice((draw.ellipse, draw.rectangle))
        shape((x, y, x + size, y + size), fill=rng.choice(_COLOURS))
    return picture


def as_data_url(picture: Image.Image) -> str:
    """A picture as OpenAI clients send it."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

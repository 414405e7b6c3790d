# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench questions`: many questions about one image, one after the other.

Unpruned, vLLM's prefix cache keeps the image's part of the prompt for the next question. Pruned,
each question has image tokens of its own, and the feature cache saves the work of the vision tower.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from pydantic import BaseModel
from rich.console import Console

from anchorprune_vllm.commands.asking import ask, connect
from anchorprune_vllm.commands.bench import probes
from anchorprune_vllm.commands.bench.contenders import Contender, check_methods
from anchorprune_vllm.commands.bench.load import SERVED_NAME
from anchorprune_vllm.commands.bench.measure import machine, table
from anchorprune_vllm.commands.bench.served import Comparison, noise

_THINGS = (
    *("dog", "cat", "bird", "horse", "cow", "sheep", "fish", "bear", "lion", "tree", "flower"),
    *("river", "lake", "cloud", "moon", "star", "mountain", "road", "car", "bus", "train", "truck"),
    *("bike", "boat", "plane", "bridge", "house", "door", "window", "roof", "wall", "table"),
)


class ServerAnswers(BaseModel):
    """The answers of one server."""

    name: str
    prompt_tokens: int
    seconds: Sequence[float]  # to the first token, of each question in turn
    embedding_seconds: float
    selection_seconds: float
    further_ms: float  # median time to first token of all questions but the first


def question(number: int) -> str:
    """Return a question; all numbers give other ones, of nearly the same length."""
    first, second = number % len(_THINGS), (number // len(_THINGS) + 1 + number) % len(_THINGS)
    return f"Is the {_THINGS[first]} left of the {_THINGS[second]}, and what color is it?"


def run_questions(wanted: Comparison, questions: int) -> list[ServerAnswers]:
    """Ask each server, print a table, and write questions.json."""
    console = Console()
    check_methods(wanted.methods, wanted.budgets)
    servers = {"unpruned": [], "unpruned, without prefix cache": ["--no-enable-prefix-caching"]}
    encoder = wanted.model.text_encoder
    for budget in wanted.budgets:
        for pruned in (Contender(str(method), budget) for method in wanted.methods):
            servers[str(pruned)] = pruned.flags(encoder)
            uncached = pruned.flags(encoder, feature_cache_mb=0)
            servers[f"{pruned}, without feature cache"] = uncached
    wanted.print_model(console)
    found = []
    for number, (name, flags) in enumerate(servers.items()):
        with ExitStack() as running:
            with console.status(f"{name}: starting"):
                log = wanted.out / f"questions-{number}.server.log"
                server = running.enter_context(wanted.model.serve(flags, log))
            before = probes.read_times(server)
            client, media = connect(server.url), noise(wanted.model.media, seed=0)
            with console.status(f"{name}: asking"):
                answers = [
                    ask(client, media, question(each), model=SERVED_NAME, max_tokens=2)
                    for each in range(questions)
                ]
            after = probes.read_times(server)
        seconds = [answer.seconds_to_first_token for answer in answers]
        found.append(
            ServerAnswers(
                name=name,
                prompt_tokens=answers[-1].prompt_tokens,
                seconds=seconds,
                further_ms=1000 * statistics.median(seconds[1:]),
                **after.since(before),
            )
        )
    title = f"{wanted.model.name}: one image, {questions} questions ({machine()})"
    columns = ["server", "prompt tokens", "first question", "further ones (median)"]
    rows = [
        [
            *(one.name, one.prompt_tokens),
            *(f"{1000 * one.seconds[0]:.0f} ms", f"{one.further_ms:.0f} ms"),
            f"{1000 * (one.embedding_seconds - one.selection_seconds):.0f} ms",
            f"{1000 * one.selection_seconds:.0f} ms",
        ]
        for one in found
    ]
    console.print(table(title, [*columns, "encoder, all", "selection, all"], rows))
    wanted.write("questions.json", servers=[one.model_dump() for one in found])
    return found

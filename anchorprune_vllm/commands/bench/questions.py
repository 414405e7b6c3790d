# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench questions`: one picture, many questions, one after the other.

Unpruned, vLLM's prefix cache keeps the picture's part of the prompt for the next question. Pruned
for a question, each has tokens of its own: the feature cache then saves the vision tower.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from anchorprune_vllm.commands.asking import ask, connect
from anchorprune_vllm.commands.bench import probes
from anchorprune_vllm.commands.bench.contenders import UNPRUNED, Contender, check_methods
from anchorprune_vllm.commands.bench.load import SERVED_NAME
from anchorprune_vllm.commands.bench.noise import noise
from anchorprune_vllm.commands.bench.serve import machine
from anchorprune_vllm.commands.bench.served import ServedModel
from anchorprune_vllm.commands.chosen_methods import Method
from anchorprune_vllm.commands.results_file import write_json

_THINGS = (
    *("dog", "cat", "bird", "horse", "cow", "sheep", "fish", "bear", "lion", "tree", "flower"),
    *("river", "lake", "cloud", "moon", "star", "mountain", "road", "car", "bus", "train", "truck"),
    *("bike", "boat", "plane", "bridge", "house", "door", "window", "roof", "wall", "table"),
)


@dataclass(frozen=True)
class Asked:
    """One server's answers."""

    name: str
    prompt_tokens: int
    seconds: Sequence[float]
    """To the first token, of each question in turn."""
    embedding_seconds: float
    selection_seconds: float

    @property
    def further_ms(self) -> float:
        """Median of all questions but the first."""
        return 1000 * statistics.median(self.seconds[1:])


def question(number: int) -> str:
    """Each another one, and of the same length or nearly so."""
    first, second = number % len(_THINGS), (number // len(_THINGS) + 1 + number) % len(_THINGS)
    return f"Is the {_THINGS[first]} left of the {_THINGS[second]}, and what color is it?"


def run_questions(
    model: ServedModel,
    methods: Sequence[Method],
    budgets: Sequence[str],
    questions: int,
    out: Path,
    command: str,
) -> list[Asked]:
    """Ask each server, print a table, write questions.json."""
    console = Console()
    check_methods(methods, budgets)
    plain = Contender(UNPRUNED).flags()
    servers = {
        "unpruned": plain,
        "unpruned, without prefix cache": [*plain, "--no-enable-prefix-caching"],
    }
    for budget in budgets:
        for pruned in (Contender(str(method), budget) for method in methods):
            servers[f"{pruned}"] = pruned.flags(model.text_encoder)
            servers[f"{pruned}, without feature cache"] = pruned.flags(
                model.text_encoder, feature_cache_mb=0
            )
    console.print(f"[bold]Model[/bold]  {model.name}", *model.notes, sep="\n")
    found = []
    for number, (name, flags) in enumerate(servers.items()):
        with ExitStack() as running:
            with console.status(f"{name}: starting"):
                log = out / f"questions-{number}.server.log"
                server = running.enter_context(model.serve(flags, log))
            before = probes.read_stages(server)
            client, picture = connect(server.url), noise(model.media, seed=0)
            with console.status(f"{name}: asking"):
                answers = [
                    ask(client, picture, question(each), model=SERVED_NAME, max_tokens=2)
                    for each in range(questions)
                ]
            after = probes.read_stages(server)
        found.append(
            Asked(
                name,
                answers[-1].prompt_tokens,
                [answer.seconds_to_first_token for answer in answers],
                after.embedding_seconds - before.embedding_seconds,
                after.selection_seconds - before.selection_seconds,
            )
        )
    console.print(_table(found, model))
    _write(out, model, command, found)
    return found


def _table(found: Sequence[Asked], model: ServedModel) -> Table:
    count = len(found[0].seconds)
    table = Table(title=f"{model.name}: one picture, {count} questions ({machine()})")
    table.add_column("server")
    for column in (
        *("prompt tokens", "first question", "further ones (median)"),
        *("encoder, all", "selection, all"),
    ):
        table.add_column(column, justify="right")
    for asked in found:
        encoder = asked.embedding_seconds - asked.selection_seconds
        table.add_row(
            *(asked.name, str(asked.prompt_tokens)),
            *(f"{1000 * asked.seconds[0]:.0f} ms", f"{asked.further_ms:.0f} ms"),
            *(f"{1000 * encoder:.0f} ms", f"{1000 * asked.selection_seconds:.0f} ms"),
        )
    return table


def _write(out: Path, model: ServedModel, command: str, found: Sequence[Asked]) -> None:
    content = {
        "command": command,
        "model": model.name,
        "machine": machine(),
        "servers": [{**asdict(asked), "further_ms": asked.further_ms} for asked in found],
    }
    write_json(out / "questions.json", content, indent=1)

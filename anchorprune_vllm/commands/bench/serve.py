# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench serve`: the same load on the same machine, unpruned and pruned."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from anchorprune_vllm.commands.bench import probes, report
from anchorprune_vllm.commands.bench.contenders import Contender, contenders
from anchorprune_vllm.commands.bench.flops import language_model_of, tiles_of, tower_of
from anchorprune_vllm.commands.bench.load import Load, put_load
from anchorprune_vllm.commands.bench.results import Measurement, Results
from anchorprune_vllm.commands.bench.served import ServedModel
from anchorprune_vllm.commands.chosen_methods import Method
from anchorprune_vllm.testing.server import VllmServer

_PACKAGES = ("anchorprune-vllm", "vllm", "torch", "transformers")


@dataclass(frozen=True)
class Benchmark:
    """What the command line asks for."""

    model: ServedModel
    load: Load
    methods: Sequence[Method]
    budgets: Sequence[str]
    concurrencies: Sequence[int]
    rounds: int
    out: Path
    with_vllm: bool = False
    """Whether vLLM's own video pruning takes part."""
    command: str = ""


def run_serve(wanted: Benchmark) -> Results:
    """Measure what is not there yet; write table and plots after every server."""
    console = Console()
    # Whatever can be wrong is found before the first server starts.
    report.check_plot()
    compared = contenders(wanted.methods, wanted.budgets, with_vllm=wanted.with_vllm)
    wanted.load.check(wanted.concurrencies)
    flops = flops_of(wanted.model, wanted.load)
    results = Results(wanted.out, _settings(wanted))
    results.commands.append(wanted.command)
    console.print(f"[bold]Model[/bold]  {wanted.model.name}", *wanted.model.notes, sep="\n")
    runs = list(_runs(compared, results, wanted))
    for number, (contender, round_, left) in enumerate(runs, 1):
        where = f"server {number} of {len(runs)}: {contender}"
        _measure(contender, round_, left, wanted, results, console, where)
        report.write_report(results, wanted.model.name, _notes(wanted), flops)
    if not runs:
        report.write_report(results, wanted.model.name, _notes(wanted), flops)
    console.print((wanted.out / "table.md").read_text(encoding="utf-8"), soft_wrap=True)
    return results


def _runs(
    compared: Sequence[Contender], results: Results, wanted: Benchmark
) -> Iterator[tuple[Contender, int, list[int]]]:
    """Servers to start, each with its round and the concurrencies that are not measured yet.

    Each round begins with another one, so that whatever changes on the machine meets all alike.
    """
    for round_ in range(wanted.rounds):
        first = round_ % len(compared)
        for contender in [*compared[first:], *compared[:first]]:
            left = [c for c in wanted.concurrencies if (contender, c, round_) not in results]
            if left:
                yield contender, round_, left


def _measure(
    contender: Contender,
    round_: int,
    concurrencies: Sequence[int],
    wanted: Benchmark,
    results: Results,
    console: Console,
    where: str,
) -> None:
    """One server, under each load."""
    budget = "" if contender.budget is None else f"-{contender.budget.removesuffix('%')}"
    name = f"{re.sub('[ /]', '-', contender.method)}{budget}-{round_}"
    runs = wanted.out / "runs"
    with ExitStack() as running:
        with console.status(f"{where}: starting (log: {runs / name}.server.log)"):
            server = running.enter_context(
                wanted.model.serve(
                    contender.flags(wanted.model.text_encoder), runs / f"{name}.server.log"
                )
            )
        for concurrency in concurrencies:
            requests = wanted.load.requests_at(concurrency)
            with console.status(f"{where}: {requests} requests, {concurrency} at once"):
                before = probes.read_stages(server)
                client = put_load(
                    *(server, wanted.model.path, wanted.load, concurrency, wanted.concurrencies),
                    *(round_, runs / f"{name}-{concurrency}"),
                )
                after = probes.read_stages(server)
                measured = Measurement(
                    contender,
                    concurrency,
                    round_,
                    client,
                    kv_tokens=probes.read_kv_tokens(server),
                    embedding_seconds=after.embedding_seconds - before.embedding_seconds,
                    selection_seconds=after.selection_seconds - before.selection_seconds,
                    memory_bytes=_memory(after, server),
                )
            results.add(measured)
            console.print(
                f"{contender}, {concurrency} at once: first token {measured.ttft_ms:.0f} ms, "
                f"{measured.requests_per_second:.2f} requests/s"
            )


def _memory(stages: probes.Stages, server: VllmServer) -> int:
    if stages.device_bytes is not None:
        return int(stages.device_bytes)
    return probes.host_bytes(server.pid)  # it leads a session of its own


def flops_of(model: ServedModel, load: Load) -> report.Flops:
    """The formula for a model; its tower's if architecture and size of the media are known."""
    config = model.hf_config()
    language_model, size = language_model_of(config), load.media
    tower = tower_of(config) if load.data is None else None  # a file's pictures have any size

    def flops(tokens: float) -> tuple[float | None, float]:
        whole = None
        if tower is not None:
            whole = tower.flops(*tiles_of(config, size.width, size.height, size.frames))
        return whole, language_model.flops(round(tokens))

    return flops


def _settings(wanted: Benchmark) -> dict[str, object]:
    load = asdict(wanted.load)
    return {
        "model": wanted.model.name,
        "sizes": list(wanted.model.notes),
        "server_flags": list(wanted.model.flags),
        "media": str(wanted.model.media),
        "load": {**load, "media": str(wanted.load.media), "data": str(wanted.load.data)},
        "machine": machine(),
        "versions": {package: version(package) for package in _PACKAGES},
    }


def machine() -> str:
    """What it runs on."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores, {name}"


def _notes(wanted: Benchmark) -> list[str]:
    media = wanted.load.media
    kind = "clip" if media.frames > 1 else "picture"
    what = f"{wanted.load.question_tokens} random words' tokens and a {media} {kind}"
    if wanted.load.data is not None:
        what = f"lines of {wanted.load.data.name}"
    counts = ", ".join(
        f"{wanted.load.requests_at(c)} requests {c} at once" for c in wanted.concurrencies
    )
    return [
        f"`{wanted.command}`",
        f"machine: {machine()}",
        *wanted.model.notes,
        f"load: {what}, {wanted.load.output_tokens} tokens of answer; {counts}",
        f"servers: `vllm serve {' '.join(wanted.model.flags)}`",
    ]

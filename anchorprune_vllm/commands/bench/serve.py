# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench serve`: the same load on the same machine, unpruned and pruned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from anchorprune_vllm.commands.bench import probes, report
from anchorprune_vllm.commands.bench.contenders import Contender, contenders
from anchorprune_vllm.commands.bench.flops import language_model_of, tiles_of, tower_of
from anchorprune_vllm.commands.bench.load import Load
from anchorprune_vllm.commands.bench.measure import machine
from anchorprune_vllm.commands.bench.results import Measurement, ServeResults
from anchorprune_vllm.commands.bench.served import Comparison, ServedModel

_PACKAGES = ("anchorprune-vllm", "vllm", "torch", "transformers")


@dataclass(frozen=True)
class ServeComparison(Comparison):
    """What the user wants to be measured."""

    load: Load
    rounds: int = 1
    with_vllm: bool = False  # whether to compare with vLLM's own video pruning

    @property
    def results_file(self) -> Path:
        """Where measurements are kept."""
        return self.out / "results.json"

    def settings(self) -> dict[str, object]:
        """Return what measurements must share to be compared."""
        load = asdict(self.load) | {"media": str(self.load.media), "data": str(self.load.data)}
        del load["concurrencies"]
        return {
            "model": self.model.name,
            "sizes": list(self.model.notes),
            "server_flags": list(self.model.flags),
            "media": str(self.model.media),
            "load": load,
            "machine": machine(),
            "versions": {package: version(package) for package in _PACKAGES},
        }

    def notes(self) -> list[str]:
        """Return what readers of the report need to know."""
        load = self.load
        kind = "video" if load.media.frames > 1 else "image"
        content = f"{load.question_tokens} random words' tokens and a {load.media} {kind}"
        if load.data is not None:
            content = f"lines of {load.data.name}"
        counts = [f"{load.requests_at(c)} requests {c} at once" for c in load.concurrencies]
        return [
            f"`{self.command}`",
            f"machine: {machine()}",
            *self.model.notes,
            f"load: {content}, {load.output_tokens} tokens of answer; {', '.join(counts)}",
            f"servers: `vllm serve {' '.join(self.model.flags)}`",
        ]


def run_serve(wanted: ServeComparison) -> ServeResults:
    """Measure what is missing in results.json, and write the report after every server."""
    console = Console()
    # Find all mistakes before the first server starts.
    report.check_plot()
    compared = contenders(wanted.methods, wanted.budgets, with_vllm=wanted.with_vllm)
    wanted.load.check()
    flops = flops_of(wanted.model, wanted.load)
    none_yet = ServeResults(settings=wanted.settings(), commands=[], measurements=[])
    results = none_yet.continued(wanted.results_file)
    results.commands.append(wanted.command)
    wanted.print_model(console)
    servers = list(_missing(compared, results, wanted))
    for number, (contender, round_, concurrencies) in enumerate(servers, 1):
        name = f"server {number} of {len(servers)}: {contender}"
        _measure(contender, round_, concurrencies, wanted, results, console, name)
        report.write_report(results, wanted.out, wanted.model.name, wanted.notes(), flops)
    if not servers:
        report.write_report(results, wanted.out, wanted.model.name, wanted.notes(), flops)
    console.print((wanted.out / "table.md").read_text(encoding="utf-8"), soft_wrap=True)
    return results


def _missing(
    compared: Sequence[Contender], results: ServeResults, wanted: ServeComparison
) -> Iterator[tuple[Contender, int, list[int]]]:
    """Yield the servers to start, each with its round and the concurrencies to measure.

    Each round begins with another contender, so that changes of the machine affect all alike.
    """
    for round_ in range(wanted.rounds):
        first = round_ % len(compared)
        for contender in [*compared[first:], *compared[:first]]:
            asked = [(contender, c, round_) for c in wanted.load.concurrencies]
            if left := [each[1] for each in asked if each not in results]:
                yield contender, round_, left


def _measure(
    contender: Contender,
    round_: int,
    concurrencies: Sequence[int],
    wanted: ServeComparison,
    results: ServeResults,
    console: Console,
    name: str,
) -> None:
    """Start a server, measure it at each concurrency, and keep each measurement at once."""
    budget = "" if contender.budget is None else f"-{contender.budget.removesuffix('%')}"
    stem = f"{re.sub('[ /]', '-', contender.method)}{budget}-{round_}"
    log = wanted.out / "runs" / f"{stem}.server.log"
    flags = contender.flags(wanted.model.text_encoder)
    with ExitStack() as running:
        with console.status(f"{name}: starting (log: {log})"):
            server = running.enter_context(wanted.model.serve(flags, log))
        for concurrency in concurrencies:
            requests = wanted.load.requests_at(concurrency)
            out = wanted.out / "runs" / f"{stem}-{concurrency}"
            with console.status(f"{name}: {requests} requests, {concurrency} at once"):
                before = probes.read_times(server)
                client = wanted.load.put_on(server, wanted.model.path, concurrency, round_, out)
                after = probes.read_times(server)
            measured = Measurement(
                contender=contender,
                concurrency=concurrency,
                round=round_,
                client=client,
                kv_tokens=probes.read_kv_tokens(server),
                **after.since(before),
                memory_bytes=after.device_bytes or probes.host_bytes(server.pid),
            )
            results.measurements.append(measured)
            results.save(wanted.results_file)
            console.print(
                f"{contender}, {concurrency} at once: first token {client.median_ttft_ms:.0f} ms, "
                f"{client.request_throughput:.2f} requests/s"
            )


def flops_of(model: ServedModel, load: Load) -> report.Flops:
    """Return the formula for a model; for its tower, if architecture and media size are known."""
    config = model.hf_config()
    language_model, size = language_model_of(config), load.media
    tower = tower_of(config) if load.data is None else None  # the images of a file have any size
    whole = None if tower is None else tower.flops(*tiles_of(config, *size))
    return lambda tokens: (whole, language_model.flops(round(tokens)))

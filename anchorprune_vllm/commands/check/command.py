# SPDX-License-Identifier: Apache-2.0
"""`anchorprune check`: its arguments, the order of its parts, and its report."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anchorprune_vllm.commands.check.findings import Finding

_COLOURS = {"ok": "green", "FAILED": "bold red", "skipped": "yellow"}


def add_check(commands: Any) -> None:
    """Add `check` to the subcommands of `anchorprune`."""
    command = commands.add_parser(
        "check",
        help="see whether pruning works on this machine: the first thing to run on a GPU",
        description="See whether pruning works on this machine, CPU or GPU: versions, vLLM's "
        "hooks, kernels against plain torch, host waits, the time that selection takes, and "
        "servers of tiny models with each model runner, compiled and eager. Takes some minutes. "
        "Exits with 1 if something failed, and says what to do.",
    )
    command.add_argument(
        "--directory",
        type=Path,
        default=Path(".check"),
        help="where to put the tiny models and the servers' logs (default: .check)",
    )
    command.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report to a file that can be sent in"
    )
    command.add_argument(
        "--no-servers", action="store_true", help="leave out the servers: less than a minute"
    )
    command.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.markup import escape

    from anchorprune_vllm.commands.bench.measure import table, this_device
    from anchorprune_vllm.commands.check.machine import Times, machine_facts
    from anchorprune_vllm.commands.results_file import write_json

    console = Console()
    facts = machine_facts()
    for name, fact in facts.items():
        console.print(f"{name:>18}  {escape(fact)}", highlight=False)
    findings: list[Finding] = []
    times: list[Times] = []
    rows = []
    with console.status("checking") as status:
        for finding in _findings(args, this_device(), times):
            findings.append(finding)
            colour = _COLOURS[finding.status]
            result = f"[{colour}]{finding.status}[/{colour}]"
            rows.append([escape(finding.name), result, escape(finding.found)])
            status.update(escape(f"checking ({len(findings)} done; last: {finding.name})"))
    if times:
        console.print(table("Selection, on this machine", list(times[0]), map(dict.values, times)))
    columns = ["check", "result", "found"]
    console.print(table("anchorprune check", columns, rows, text_columns=3))
    if args.json:
        found = [finding._asdict() for finding in findings]
        write_json(args.json, {"machine": facts, "findings": found, "times": times}, indent=2)
        console.print(f"Written: {args.json}")
    failures = [finding for finding in findings if finding.status == "FAILED"]
    for failure in failures:
        said = escape(f"{failure.found}. {failure.advice}")
        console.print(f"[bold red]{escape(failure.name)}[/bold red]: {said}")
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(findings)} checks failed")
    skipped = sum(finding.status == "skipped" for finding in findings)
    console.print(
        f"Nothing failed; {skipped} of {len(findings)} were skipped. Serve your model with "
        "--anchorprune-budget."
    )


def _findings(args: argparse.Namespace, device: Any, times: list[Any]) -> Iterator[Finding]:
    """Run all parts of the check; the times that are measured are added to `times`."""
    from anchorprune_vllm.commands.check import kernels, machine, servers
    from anchorprune_vllm.commands.check.findings import guarded

    yield from guarded("vLLM's hooks", machine.check_vllm)
    yield from guarded("kernels", kernels.check_choices, device)
    yield from guarded("received attention", kernels.check_received_attention, device)
    yield from guarded("host waits", kernels.check_waits, device)
    yield from guarded("time of choosing", machine.check_speed, device, times)
    if not args.no_servers:
        yield from guarded("servers", servers.check_servers, device, args.directory)

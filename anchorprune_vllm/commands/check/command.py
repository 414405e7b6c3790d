# SPDX-License-Identifier: Apache-2.0
"""`anchorprune check`: its arguments, and the order of its parts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anchorprune_vllm.commands.check.findings import Finding


def add_check(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "check",
        help="see whether pruning works on this machine: the first thing to run on a GPU",
        description="See whether pruning works on this machine, CPU or GPU: versions, vLLM's "
        "hooks, kernels against plain torch, host waits, the time that choosing takes, and "
        "servers of tiny models with each model runner, compiled and eager. Some minutes. Exits "
        "with 1 if something failed, and says what to do.",
    )
    command.add_argument(
        "--directory",
        type=Path,
        default=Path(".check"),
        help="for the tiny models and the servers' logs (default: .check)",
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

    from anchorprune_vllm.commands.check import machine, speed
    from anchorprune_vllm.commands.check.findings import findings_table, write_json

    console = Console()
    facts = machine.machine_facts()
    for name, fact in facts.items():
        console.print(f"{name:>18}  {escape(fact)}", highlight=False)
    findings: list[Finding] = []
    times: list[speed.Times] = []
    with console.status("checking") as status:
        for finding in _findings(args, machine.device_here(), times):
            findings.append(finding)
            status.update(escape(f"checking ({len(findings)} done; last: {finding.name})"))
    if times:
        console.print(speed.speed_table(times))
    console.print(findings_table(findings))
    if args.json:
        write_json(args.json, facts, findings, times=times)
        console.print(f"Written: {args.json}")
    failed = [finding for finding in findings if finding.status == "FAILED"]
    for finding in failed:
        said = escape(f"{finding.found}. {finding.advice}")
        console.print(f"[bold red]{escape(finding.name)}[/bold red]: {said}")
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(findings)} checks failed")
    skipped = sum(finding.status == "skipped" for finding in findings)
    console.print(
        f"Nothing failed; {skipped} of {len(findings)} were skipped. Serve your model with "
        "--anchorprune-budget."
    )


def _findings(args: argparse.Namespace, device: Any, times: list[Any]) -> Iterator[Finding]:
    """Go through all parts; `times` is filled on the way."""
    from anchorprune_vllm.commands.check import kernels, machine, servers, speed
    from anchorprune_vllm.commands.check.findings import guarded

    yield from guarded("vLLM's hooks", machine.check_vllm)
    yield from guarded("kernels", kernels.check_choices, device)
    yield from guarded("received attention", kernels.check_received_attention, device)
    yield from guarded("host waits", kernels.check_waits, device)
    yield from guarded("time of choosing", speed.check_speed, device, times)
    if not args.no_servers:
        yield from guarded("servers", servers.check_servers, device, args.directory)

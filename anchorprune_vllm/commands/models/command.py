# SPDX-License-Identifier: Apache-2.0
"""`anchorprune models`: its arguments, and how the table is shown."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

_COLOURS = {"full": "green", "reduced": "yellow", "general": "", "no": "red"}


def add_models(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "models",
        help="list the architectures of this vLLM that can be pruned, and how they were tested",
        description="List the architectures of the installed vLLM that see images or videos: "
        "whether they are pruned at the full or the reduced level, or only the general one is "
        "known, which finds out when a model is loaded; what states that; how they were tested; "
        "and why some are not served. Loads no model.",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(run=_models)


def _models(args: argparse.Namespace) -> None:
    import vllm
    from rich.console import Console
    from rich.table import Table

    from anchorprune_vllm.commands.models.listing import make_rows
    from anchorprune_vllm.commands.models.record import read_record
    from anchorprune_vllm.commands.models.registry import installed_architectures

    record = read_record()
    rows = make_rows(installed_architectures(record.architectures), record)
    if args.json:
        versions = {"vllm": vllm.__version__, "recorded_with": record.vllm}
        print(json.dumps(versions | {"models": [asdict(row) for row in rows]}, indent=2))
        return
    table = Table()
    for title in ("architecture", "sees", "level", "stated by", "tested", "remarks"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*asdict(row).values(), style=_COLOURS[row.level])
    console = Console()
    console.print(table)
    console.print(
        f"{len(rows)} architectures of vLLM {vllm.__version__}; the sweep was recorded with vLLM "
        f"{record.vllm}.",
        highlight=False,
    )

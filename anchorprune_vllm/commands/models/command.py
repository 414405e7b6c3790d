# SPDX-License-Identifier: Apache-2.0
"""The arguments and the table of `anchorprune models`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

_WIDTH = 160
_COLOURS = {"full": "green", "reduced": "yellow", "general": "", "no": "red"}


def add_models(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "models",
        help="list the architectures of this vLLM that can be pruned, and how they were tested",
        description="List the architectures of the installed vLLM that take images or videos. "
        "Levels: full, importance comes from the attention of the vision tower; reduced, it comes "
        "from the token embeddings; general, one of the two, which is found out when a checkpoint "
        "is loaded; no, pruning is refused, and the remarks say why. No model is loaded.",
        epilog="Example: anchorprune models --json > models.json",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(run=_models)


def _models(args: argparse.Namespace) -> None:
    import vllm
    from rich.console import Console
    from rich.table import Table

    from anchorprune_vllm.commands.models import record, registry
    from anchorprune_vllm.commands.models.listing import make_rows

    known = record.read_record()
    rows = make_rows(registry.installed_architectures(known.architectures), known)
    if args.json:
        versions = {"vllm": vllm.__version__, "recorded_with": known.vllm}
        print(json.dumps(versions | {"models": [asdict(row) for row in rows]}, indent=2))
        return
    table = Table()
    for title in ("architecture", "sees", "level", "stated by", "tested", "remarks"):
        table.add_column(title, no_wrap=title != "remarks", overflow="fold")
    for row in rows:
        table.add_row(*asdict(row).values(), style=_COLOURS[row.level])
    console = Console()
    # A narrow terminal breaks the lines by itself; names that the table broke could not be found.
    console.width = max(console.width, console.measure(table).minimum, _WIDTH)
    console.print(table)
    console.print(
        f"{len(rows)} architectures of vLLM {vllm.__version__}; the sweep was recorded with vLLM "
        f"{known.vllm}.",
        highlight=False,
    )

# SPDX-License-Identifier: Apache-2.0
"""The arguments of `anchorprune demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands.options import DEMO_ARCHITECTURES, add_budgets, positive


def add_demo(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "demo",
        help="serve a tiny model with pruning and ask it at several budgets",
        description="Make a tiny model, start `vllm serve` with pruning, ask through the openai "
        "client at several budgets, print a table, and stop the server. Needs no GPU and no "
        "network; takes a minute or two.",
        epilog="Example: anchorprune demo --arch qwen2.5-vl --budgets 100% 32 8",
    )
    command.add_argument(
        "--directory",
        type=Path,
        default=Path(".demo"),
        metavar="DIR",
        help="where the model and the server's log go (default: .demo)",
    )
    command.add_argument(
        "--arch",
        choices=DEMO_ARCHITECTURES,
        default="llava-1.5",
        help="architecture of the model (default: llava-1.5); llava-1.5 and qwen2.5-vl are trained "
        "to answer questions about coloured shapes, the others have random weights",
    )
    add_budgets(command, "100%,64,32,16,8,4,2")
    command.add_argument(
        "--images",
        type=positive,
        default=5,
        metavar="N",
        help="images (llava-video: videos) timed per budget (default: 5)",
    )
    command.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> None:
    from anchorprune_vllm.commands.demo.run import run_demo

    run_demo(args.directory, args.arch, args.budgets, args.images)

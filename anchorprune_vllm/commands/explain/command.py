# SPDX-License-Identifier: Apache-2.0
"""Arguments of `anchorprune explain`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands.options import (
    add_budgets,
    add_engine_args,
    add_methods,
    add_text_encoder,
    engine_args,
)
from anchorprune_vllm.config import SCOPES


def add_explain(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "explain",
        help="draw which tokens of a picture or video are kept for a question",
        usage="%(prog)s [MODEL [IMAGE_OR_VIDEO [QUESTION]]] [OPTION ...]",
        description="Run the processor, vision tower and selection of the server on one picture or "
        "video, and draw what is kept: dropped tokens dimmed, the relevance anchor and its context "
        "outlined, beside the maps of relevance and importance. Without arguments: a drawn scene, "
        "with the trained demo model.",
    )
    command.add_argument(
        "model",
        nargs="?",
        default="demo",
        metavar="MODEL",
        help="hub id or local path; demo (default): the trained demo model",
    )
    command.add_argument(
        "media",
        nargs="?",
        default="clutter:0",
        metavar="IMAGE_OR_VIDEO",
        help="a file; clutter:NUMBER (default: clutter:0) or scene:NUMBER: a drawn one, full or "
        "simple, with a question of its own",
    )
    command.add_argument("question", nargs="?", metavar="QUESTION", help="what is asked about it")
    add_methods(command, "; several make a grid")
    add_budgets(command, "5.6%,11.1%,22.2%", "; several make a grid")
    command.add_argument(
        "--query", choices=SCOPES, default="turn", help="as --anchorprune-query (default: turn)"
    )
    add_text_encoder(command)
    add_engine_args(command)
    command.add_argument(
        "--out",
        type=Path,
        default=Path("explain.png"),
        metavar="FILE",
        help="FILE.png, or FILE.html: one page that needs no network (default: explain.png)",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="all of it for machines, too")
    command.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> None:
    # vLLM would write between the lines.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from anchorprune_vllm.commands.explain.run import Wanted, run_explain

    run_explain(
        Wanted(
            model=args.model,
            media=args.media,
            question=args.question,
            budgets=args.budgets,
            methods=args.methods,
            query=args.query,
            text_encoder=args.text_encoder,
            engine_args=engine_args(args),
            out=args.out,
            json=args.json,
        )
    )

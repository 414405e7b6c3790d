# SPDX-License-Identifier: Apache-2.0
"""Arguments of `anchorprune explain`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from anchorprune_vllm import methods
from anchorprune_vllm.query import SCOPES
from anchorprune_vllm.tools.arguments import budgets, json_object

_BUDGETS = "5.6%,11.1%,22.2%"


def add_explain(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "explain",
        help="draw which tokens of a picture or video are kept for a question",
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
        default="scene:0",
        metavar="IMAGE_OR_VIDEO",
        help="a file; scene:NUMBER (default: scene:0): a drawn one, with a question of its own",
    )
    command.add_argument("question", nargs="?", metavar="QUESTION", help="what is asked about it")
    command.add_argument(
        "--budget",
        type=budgets,
        action="append",
        metavar="K",
        help="tokens kept: a whole number or a share; give several for a grid (default: "
        f"{_BUDGETS.replace('%', '%%')})",
    )
    command.add_argument(
        "--method",
        action="append",
        metavar="NAME",
        help=f"NAME or NAME:key=value,key=value; names: {', '.join(methods.names())}, or all; give "
        "several for a grid (default: anchorprune). Example: anchorprune:tau=0.1,similarity=raw",
    )
    command.add_argument(
        "--query", choices=SCOPES, default="turn", help="as --anchorprune-query (default: turn)"
    )
    command.add_argument(
        "--text-encoder",
        metavar="ID_OR_PATH",
        help="as --anchorprune-text-encoder of vllm serve (default: MODEL/clip or MODEL/siglip if "
        "there, else what is known)",
    )
    command.add_argument(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help='arguments of vLLM, such as {"dtype": "bfloat16"}',
    )
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
    from anchorprune_vllm.tools.explain.run import Wanted, run_explain

    given = args.budget or [budgets(_BUDGETS)]
    run_explain(
        Wanted(
            model=args.model,
            media=args.media,
            question=args.question,
            budgets=tuple(dict.fromkeys(budget for some in given for budget in some)),
            methods=tuple(args.method or ["anchorprune"]),
            query=args.query,
            text_encoder=args.text_encoder,
            engine_args=args.engine_args,
            out=args.out,
            json=args.json,
        )
    )

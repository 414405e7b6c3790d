# SPDX-License-Identifier: Apache-2.0
"""The arguments of `anchorprune explain`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands import options
from anchorprune_vllm.config import SCOPES


def add_explain(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "explain",
        help="draw which tokens of an image or video are kept for a question",
        usage="%(prog)s [MODEL [IMAGE_OR_VIDEO [QUESTION]]] [OPTION ...]",
        description="Run the server's processor, vision tower and selection on an image or video, "
        "and draw what is kept: dropped tokens are dimmed, the relevance anchor and its context "
        "outlined, beside the maps of relevance and importance. Several methods or budgets stand "
        "beside one another. Without arguments it draws a cluttered scene for the trained demo "
        "model.",
        epilog='Example: anchorprune explain llava-hf/llava-1.5-7b-hf bus.jpg "What number is the '
        'bus?" --methods anchorprune divprune --budgets 64 --out bus.html',
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
        help="a file; or clutter:NUMBER (default: clutter:0) or scene:NUMBER for a drawn scene, "
        "cluttered or simple, which has a question of its own",
    )
    command.add_argument("question", nargs="?", metavar="QUESTION", help="what is asked about it")
    options.add_methods(command)
    options.add_budgets(command, "5.6%,11.1%,22.2%")
    command.add_argument(
        "--query", choices=SCOPES, default="turn", help="as --anchorprune-query (default: turn)"
    )
    options.add_text_encoder(command)
    options.add_engine_args(command)
    command.add_argument(
        "--out",
        type=Path,
        default=Path("explain.png"),
        metavar="FILE",
        help="FILE.png; or FILE.html, a page that shows each token's numbers under the pointer and "
        "needs no network (default: explain.png)",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers as JSON")
    command.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # else vLLM writes between the lines
    from anchorprune_vllm.commands.explain.run import ExplainSettings, run_explain

    engine_args = options.engine_args(args)
    run_explain(options.settings_of(args, ExplainSettings, engine_args=engine_args))

# SPDX-License-Identifier: Apache-2.0
"""Arguments of `anchorprune eval`."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands.options import (
    add_budgets,
    add_engine_args,
    add_methods,
    add_out,
    add_several,
    add_text_encoder,
    choices,
    engine_args,
    positive,
)
from anchorprune_vllm.config import POSITIONS, SCOPES


def add_eval(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "eval",
        help="accuracy on a VQA set, at several budgets and with several methods",
        usage="%(prog)s MODEL [OPTION ...]",
        description="Put the questions of a VQA set to the offline engine: unpruned, and with each "
        "method at each budget. Exact match with 95% intervals, as DIR/results.json, table.md and "
        "accuracy.png. Each run is kept as soon as it ends: the same command goes on where it was "
        "stopped, one with more methods or budgets adds to the same results.",
    )
    command.add_argument("model", metavar="MODEL", help="hub id or local path")
    add_several(
        command,
        "--data",
        lambda text: [text],
        ["easy-vqa"],
        metavar="SET",
        help="easy-vqa (default), scenes, clutter, or a file with lines such as "
        '{"image": "a.png", "question": "...", "answers": ["..."], "kind": "..."}; several: Rel. '
        "is the mean",
    )
    add_methods(command)
    add_budgets(command, "5.6%,11.1%,22.2%")
    add_several(
        command,
        "--query",
        choices(SCOPES),
        ["turn"],
        metavar="SCOPE",
        help=f"of {', '.join(SCOPES)} (default: turn)",
    )
    add_several(
        command,
        "--positions",
        choices(POSITIONS),
        [None],
        metavar="KIND",
        help=f"of {', '.join(POSITIONS)} (default: the model's own)",
    )
    command.add_argument(
        "--ceiling",
        action="store_true",
        help="also run AnchorPrune with perfect relevance: 1 on the things that a question is "
        "about, 0 elsewhere; needs --data clutter, which knows where they are",
    )
    command.add_argument(
        "--limit",
        type=_limit,
        default=2000,
        metavar="N",
        help="questions of each set, whole pictures in order (default: 2000; 0 or all: all)",
    )
    add_text_encoder(command)
    add_out(command, Path("eval-results"), "eval-results")
    command.add_argument(
        "--max-tokens", type=positive, default=16, metavar="N", help="of an answer (default: 16)"
    )
    command.add_argument(
        "--prompt",
        default="{question}",
        help="what is asked (default: {question}); for models that answer in sentences: "
        "'{question} Answer with a single word.'",
    )
    command.add_argument(
        "--add-special-tokens",
        action="store_true",
        help="put the tokenizer's special tokens before the chat, which vLLM does not do: for "
        "models trained with a <s> that their chat template lacks",
    )
    add_engine_args(command)
    command.set_defaults(run=_eval, when_stopped="; the same command goes on from here")


def _limit(text: str) -> int | None:
    if text in ("0", "all"):
        return None
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; 0 or all: all questions") from error


def _eval(args: argparse.Namespace) -> None:
    # vLLM would write into the progress bar.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from anchorprune_vllm.commands.eval.run import Evaluation, run_eval

    run_eval(
        Evaluation(
            model=args.model,
            out=args.out,
            data=args.data,
            methods=args.methods,
            budgets=args.budgets,
            scopes=args.query,
            positions=args.positions,
            limit=args.limit,
            ceiling=args.ceiling,
            text_encoder=args.text_encoder,
            max_tokens=args.max_tokens,
            prompt=args.prompt,
            add_special_tokens=args.add_special_tokens,
            engine_args=engine_args(args),
            command=shlex.join(["anchorprune", *args.given]),
        )
    )

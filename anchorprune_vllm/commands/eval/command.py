# SPDX-License-Identifier: Apache-2.0
"""The arguments of `anchorprune eval`."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands import options
from anchorprune_vllm.config import POSITIONS, SCOPES


def add_eval(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "eval",
        help="measure accuracy on questions with known answers, at several budgets and methods",
        usage="%(prog)s MODEL [OPTION ...]",
        description="Ask vLLM's offline engine questions with known answers: unpruned, and with "
        "each method at each budget. Writes DIR/results.json, table.md and accuracy.png: exact "
        "match with 95% intervals, and Rel., the accuracy in percent of the unpruned model's. "
        "Every run is kept as soon as it ends. The same command goes on where it was stopped, and "
        "one with more methods or budgets adds to the same results.",
        epilog="Example: anchorprune eval llava-hf/llava-1.5-7b-hf --data questions.jsonl "
        "--methods anchorprune divprune --budgets 128 64 32",
    )
    command.add_argument("model", metavar="MODEL", help="hub id or local path")
    options.add_several(
        command,
        "--data",
        lambda text: [text],
        ["easy-vqa"],
        metavar="SET",
        help="easy-vqa (default), scenes, clutter, or a file with lines such as "
        '{"image": "a.png", "question": "...", "answers": ["..."], "kind": "..."}; the Rel. of '
        "several sets is the mean of theirs",
    )
    options.add_methods(command)
    options.add_budgets(command, "5.6%,11.1%,22.2%")
    options.add_several(
        command,
        "--query",
        options.choices(SCOPES),
        ["turn"],
        metavar="SCOPE",
        help=f"what counts as the question: {', '.join(SCOPES)} (default: turn)",
    )
    options.add_several(
        command,
        "--positions",
        options.choices(POSITIONS),
        [None],
        metavar="KIND",
        help=f"positions of kept tokens: {', '.join(POSITIONS)} (default: the model's own)",
    )
    command.add_argument(
        "--ceiling",
        action="store_true",
        help="also run AnchorPrune with perfect relevance: 1 on the things that a question is "
        "about, 0 elsewhere; needs --data clutter or scenes, which know where things are",
    )
    command.add_argument(
        "--limit",
        type=_limit,
        default=2000,
        metavar="N",
        help="the most questions of each set, as whole images in order (default: 2000; 0 or all: "
        "no limit)",
    )
    options.add_text_encoder(command)
    options.add_out(command, Path("eval-results"), "eval-results")
    command.add_argument(
        "--max-tokens",
        type=options.positive,
        default=16,
        metavar="N",
        help="longest answer (default: 16)",
    )
    command.add_argument(
        "--prompt",
        default="{question}",
        help="the text that is asked (default: {question}); for models that answer in sentences: "
        "'{question} Answer with a single word.'",
    )
    command.add_argument(
        "--add-special-tokens",
        action="store_true",
        help="put the tokenizer's special tokens before the chat, which vLLM does not do: for "
        "models trained with a <s> that their chat template lacks",
    )
    options.add_engine_args(command)
    command.set_defaults(run=_eval, when_stopped="; the same command goes on from here")


def _limit(text: str) -> int | None:
    if text in ("0", "all"):
        return None
    try:
        return options.positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; 0 or all: all questions") from error


def _eval(args: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # else vLLM writes into the progress bar
    from anchorprune_vllm.commands.eval.run import Evaluation, run_eval

    command = shlex.join(["anchorprune", *args.given])
    engine_args = options.engine_args(args)
    run_eval(options.settings_of(args, Evaluation, engine_args=engine_args, command=command))

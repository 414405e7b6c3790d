# SPDX-License-Identifier: Apache-2.0
"""The `anchorprune` command: its subcommands, and what it prints when one fails or is stopped."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from anchorprune_vllm import __version__
from anchorprune_vllm.commands.bench.command import add_bench
from anchorprune_vllm.commands.check.command import add_check
from anchorprune_vllm.commands.demo.command import add_demo
from anchorprune_vllm.commands.eval.command import add_eval
from anchorprune_vllm.commands.explain.command import add_explain
from anchorprune_vllm.commands.models.command import add_models
from anchorprune_vllm.commands.options import DEMO_ARCHITECTURES, PREFIX, Parser
from anchorprune_vllm.testing.tiny_models import TINY_MODELS


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; a user's error is printed as one line."""
    args = _parser().parse_args(argv)
    args.given = sys.argv[1:] if argv is None else argv
    try:
        with _interrupted_by_signals():
            args.run(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"anchorprune: error: {str(error).removeprefix(PREFIX)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"anchorprune: stopped{args.when_stopped}", file=sys.stderr)
        return 130
    return 0


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGINT raise KeyboardInterrupt, so that what was started is stopped too.

    SIGINT is included because shells start background jobs with it ignored.
    """
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="anchorprune",
        description="Tools for visual-token pruning with vLLM. To serve a pruned model, use vLLM "
        "itself: vllm serve MODEL --anchorprune-budget 64",
        epilog="To see it work without a GPU or a download: anchorprune demo. Each command "
        "explains itself: anchorprune COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(when_stopped="")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_demo(commands)
    _add_demo_model(commands)
    add_explain(commands)
    add_eval(commands)
    add_models(commands)
    add_check(commands)
    add_bench(commands)
    return parser


def _add_demo_model(commands: argparse._SubParsersAction[Parser]) -> None:
    names = (*DEMO_ARCHITECTURES, *TINY_MODELS)
    command = commands.add_parser(
        "demo-model",
        help="write a tiny model, with the text encoder it needs",
        description="Write a tiny checkpoint in the hub's file format to DIR. The text encoder for "
        "--anchorprune-text-encoder, if the model needs one, goes to DIR/clip or DIR/siglip. This "
        f"takes seconds. Architectures: {', '.join(names)}.",
        epilog="Example: anchorprune demo-model tiny --arch qwen2.5-vl",
    )
    command.add_argument("directory", type=Path, metavar="DIR")
    command.add_argument(
        "--arch",
        choices=names,
        default="llava-1.5",
        metavar="NAME",
        help="architecture of the model (default: llava-1.5)",
    )
    command.add_argument(
        "--seed",
        type=int,
        help="draw random weights from this seed; without it llava-1.5 and qwen2.5-vl come with "
        "weights that were trained on images of coloured shapes, and the others use seed 0",
    )
    command.set_defaults(run=_demo_model)


def _demo_model(args: argparse.Namespace) -> None:
    from anchorprune_vllm.testing.demo_models import make

    if args.arch in make.TRAINED and args.seed is None:
        make.make_trained_model(args.directory, args.arch)
    else:
        make.make_demo_model(args.directory, arch=args.arch, seed=args.seed or 0)
    print(f"{args.directory}: {make.describe(args.directory)}")


if __name__ == "__main__":
    sys.exit(main())

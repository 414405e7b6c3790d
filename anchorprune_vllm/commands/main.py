# SPDX-License-Identifier: Apache-2.0
"""The `anchorprune` command: argument parsing only; each subcommand has a file of its own."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anchorprune_vllm import __version__
from anchorprune_vllm.commands.bench.command import add_bench
from anchorprune_vllm.commands.check.command import add_check
from anchorprune_vllm.commands.eval.command import add_eval
from anchorprune_vllm.commands.explain.command import add_explain
from anchorprune_vllm.commands.models.command import add_models
from anchorprune_vllm.commands.options import PREFIX, Parser, add_budgets, positive
from anchorprune_vllm.testing.tiny_models import FAMILIES


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; errors of the user's come as one line."""
    args = _parser().parse_args(argv)
    args.given = sys.argv[1:] if argv is None else argv
    try:
        with _stopped_by_signals():
            args.run(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"anchorprune: error: {str(error).removeprefix(PREFIX)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"anchorprune: stopped{args.when_stopped}", file=sys.stderr)
        return 130
    return 0


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """`kill` ends a command as Ctrl-C does, with what it started.

    A shell's background jobs ignore Ctrl-C, unless they say otherwise.
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
        description="Tools around visual-token pruning for vLLM. To serve a pruned model, use "
        "vLLM itself: vllm serve MODEL --anchorprune-budget 64",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(when_stopped="")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    arch: dict[str, Any] = {
        "choices": (
            "llava-1.5",
            "llava-next",
            "qwen2.5-vl",
            "llava-onevision",
            "llava-video",
        ),
        "default": "llava-1.5",
        "help": "architecture of the tiny model (default: llava-1.5); llava-1.5 and qwen2.5-vl are "
        "trained to answer questions about coloured shapes, the others have random weights",
    }
    model = commands.add_parser(
        "demo-model",
        help="make a tiny model, with the text encoder it needs",
        description="Make a tiny checkpoint in DIR, trained or with random weights, in the hub's "
        "file format, "
        "and what --anchorprune-text-encoder needs for it: a CLIP in DIR/clip, or a SigLIP in "
        "DIR/siglip (OneVision, Video). Takes seconds. Names of architectures: "
        f"{', '.join([*arch['choices'], *FAMILIES])}.",
    )
    model.add_argument("directory", type=Path, metavar="DIR")
    more = {"choices": (*arch["choices"], *FAMILIES), "metavar": "NAME"}
    model.add_argument("--arch", **arch | more)
    model.add_argument(
        "--seed",
        type=int,
        help="make random weights with this seed; llava-1.5 and qwen2.5-vl are trained without it",
    )
    model.set_defaults(run=_demo_model)

    demo = commands.add_parser(
        "demo",
        help="serve the tiny model with pruning and ask it at several budgets",
        description="Make the tiny model, start `vllm serve` with pruning, ask through the openai "
        "client at several budgets with streaming, print a table, stop the server.",
    )
    demo.add_argument(
        "--directory", type=Path, default=Path(".demo"), help="for model and log (default: .demo)"
    )
    demo.add_argument("--arch", **arch)
    add_budgets(demo, "100%,64,32,16,8,4,2")
    demo.add_argument(
        "--images",
        type=positive,
        default=5,
        help="pictures (llava-video: clips) timed per budget (default: 5)",
    )
    demo.set_defaults(run=_demo)

    add_models(commands)
    add_check(commands)
    add_bench(commands)
    add_eval(commands)
    add_explain(commands)
    return parser


def _demo_model(args: argparse.Namespace) -> None:
    from anchorprune_vllm.testing.demo_models.make import (
        TRAINED,
        describe,
        make_demo_model,
        make_trained_model,
    )

    if args.arch in TRAINED and args.seed is None:
        make_trained_model(args.directory, args.arch)
    else:
        make_demo_model(args.directory, arch=args.arch, seed=args.seed or 0)
    print(f"{args.directory}: {describe(args.directory)}")


def _demo(args: argparse.Namespace) -> None:
    from anchorprune_vllm.commands.demo.command import run_demo

    run_demo(
        args.directory,
        args.arch,
        args.budgets,
        server_budget=args.budgets[len(args.budgets) // 2],
        images=args.images,
    )


if __name__ == "__main__":
    sys.exit(main())

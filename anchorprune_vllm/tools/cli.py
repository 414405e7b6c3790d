# SPDX-License-Identifier: Apache-2.0
"""The `anchorprune` command: argument parsing only; each subcommand has a file of its own."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anchorprune_vllm import __version__
from anchorprune_vllm.budget import Budget


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; errors of the user's come as one line."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, RuntimeError) as error:
        print(f"anchorprune: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("anchorprune: stopped", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anchorprune",
        description="Tools around visual-token pruning for vLLM. To serve a pruned model, use "
        "vLLM itself: vllm serve MODEL --anchorprune-budget 64",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    arch: dict[str, Any] = {
        "choices": (
            "trained",
            "llava-1.5",
            "llava-next",
            "qwen2.5-vl",
            "llava-onevision",
            "llava-video",
        ),
        "default": "trained",
        "help": "architecture of the tiny model; trained (default): a LLaVA-1.5 that answers "
        "questions about coloured shapes, the others have random weights",
    }
    model = commands.add_parser(
        "demo-model",
        help="make a tiny model, with the text encoder it needs",
        description="Make a tiny checkpoint in DIR, trained or with random weights, in the hub's "
        "file format, "
        "and what --anchorprune-text-encoder needs for it: a CLIP in DIR/clip, or a SigLIP in "
        "DIR/siglip (OneVision, Video). Takes seconds.",
    )
    model.add_argument("directory", type=Path, metavar="DIR")
    model.add_argument("--arch", **arch)
    model.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")
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
    demo.add_argument(
        "--budgets",
        type=_budgets,
        default=_budgets("100%,64,32,16,8,4,2"),
        metavar="K,K,...",
        help="budgets to ask at: whole numbers or shares (default: 100%%,64,32,16,8,4,2)",
    )
    demo.add_argument(
        "--images",
        type=_positive,
        default=5,
        help="pictures (llava-video: clips) timed per budget (default: 5)",
    )
    demo.set_defaults(run=_demo)

    bench = commands.add_parser(
        "bench",
        help="what pruning costs in time and memory, side by side",
        description="Time token selection side by side with a straightforward loop of the same "
        "method, with and without crops, and as a share of a vision-tower call; received attention "
        "against the tower that it is taken from; videos of two lengths; and the peak memory of "
        "pruned and unpruned calls. Nine minutes on two CPU cores.",
    )
    bench.add_argument(
        "--repeats", type=_positive, default=15, help="of each measurement (default: 15)"
    )
    bench.set_defaults(run=_bench)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _budgets(text: str) -> list[str]:
    try:
        return [str(Budget.parse(part)) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _demo_model(args: argparse.Namespace) -> None:
    from anchorprune_vllm.tools.demo_model import describe, make_demo_model

    make_demo_model(args.directory, arch=args.arch, seed=args.seed)
    print(f"{args.directory}: {describe(args.directory)}")


def _demo(args: argparse.Namespace) -> None:
    from anchorprune_vllm.tools.demo import run_demo

    run_demo(
        args.directory,
        args.arch,
        args.budgets,
        server_budget=args.budgets[len(args.budgets) // 2],
        images=args.images,
    )


def _bench(args: argparse.Namespace) -> None:
    # vLLM and torch's profiler would write between the tables.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from anchorprune_vllm.tools.bench import run_bench

    run_bench(args.repeats)


if __name__ == "__main__":
    sys.exit(main())

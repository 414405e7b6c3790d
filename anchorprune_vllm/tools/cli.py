# SPDX-License-Identifier: Apache-2.0
"""The `anchorprune` command: argument parsing only; each subcommand has a file of its own."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anchorprune_vllm import __version__, methods
from anchorprune_vllm.config import POSITIONS
from anchorprune_vllm.query import SCOPES
from anchorprune_vllm.tools.arguments import budgets, json_object, positive
from anchorprune_vllm.tools.bench.command import add_bench
from anchorprune_vllm.tools.explain.command import add_explain


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; errors of the user's come as one line."""
    args = _parser().parse_args(argv)
    args.given = sys.argv[1:] if argv is None else argv
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
        type=budgets,
        default=budgets("100%,64,32,16,8,4,2"),
        metavar="K,K,...",
        help="budgets to ask at: whole numbers or shares (default: 100%%,64,32,16,8,4,2)",
    )
    demo.add_argument(
        "--images",
        type=positive,
        default=5,
        help="pictures (llava-video: clips) timed per budget (default: 5)",
    )
    demo.set_defaults(run=_demo)

    add_bench(commands)
    _add_eval(commands)
    add_explain(commands)
    return parser


def _add_eval(commands: Any) -> None:
    command = commands.add_parser(
        "eval",
        help="accuracy on a VQA set, at several budgets and with several methods",
        description="Put the questions of a VQA set to the offline engine: unpruned, and with each "
        "method at each budget. Exact match with 95% intervals, as DIR/results.json, table.md and "
        "accuracy.png. Each run is kept as soon as it ends: the same command goes on where it was "
        "stopped, one with more methods or budgets adds to the same results.",
    )
    command.add_argument("model", metavar="MODEL", help="hub id or local path")
    command.add_argument(
        "--data",
        nargs="+",
        default=["easy-vqa"],
        metavar="SET",
        help="easy-vqa (default), scenes, or a file with lines such as "
        '{"image": "a.png", "question": "...", "answers": ["..."], "kind": "..."}; several: Rel. '
        "is the mean",
    )
    command.add_argument(
        "--methods",
        nargs="+",
        default=["anchorprune"],
        metavar="METHOD",
        help=f"NAME or NAME:key=value,key=value; names: {', '.join(methods.names())}, or all "
        "(default: anchorprune). Example: --methods anchorprune anchorprune:tau=0.1,patience=2",
    )
    command.add_argument(
        "--budgets",
        type=budgets,
        default=budgets("5.6%,11.1%,22.2%"),
        metavar="K,K,...",
        help="whole numbers or shares (default: 5.6%%,11.1%%,22.2%%)",
    )
    command.add_argument(
        "--query",
        type=_choices(SCOPES),
        default=["turn"],
        metavar="SCOPE,...",
        help=f"of {', '.join(SCOPES)} (default: turn)",
    )
    command.add_argument(
        "--positions",
        type=_choices(POSITIONS),
        default=[None],
        metavar="KIND,...",
        help=f"of {', '.join(POSITIONS)} (default: the model's own)",
    )
    command.add_argument(
        "--limit",
        type=_limit,
        default=2000,
        metavar="N",
        help="questions of each set, whole pictures in order (default: 2000; 0 or all: all)",
    )
    command.add_argument(
        "--text-encoder",
        metavar="ID_OR_PATH",
        help="as --anchorprune-text-encoder of vllm serve (default: MODEL/clip or MODEL/siglip if "
        "there, else what is known)",
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("eval-results"),
        metavar="DIR",
        help="(default: eval-results)",
    )
    command.add_argument(
        "--max-tokens", type=positive, default=16, help="of an answer (default: 16)"
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
    command.add_argument("--dtype", help="of the model (default: its own; on a CPU float32)")
    command.add_argument("--max-model-len", type=positive, help="of the engine")
    command.add_argument(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help='further arguments of vllm.LLM, such as {"tensor_parallel_size": 2}',
    )
    command.set_defaults(run=_eval)


def _choices(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        parts = text.split(",")
        for part in parts:
            if part not in allowed:
                raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(allowed)}")
        return parts

    return parse


def _limit(text: str) -> int | None:
    return None if text in ("0", "all") else positive(text)


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


def _eval(args: argparse.Namespace) -> None:
    # vLLM would write into the progress bar.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # `kill` ends it as Ctrl-C does: with its engine.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from anchorprune_vllm.tools.eval import Evaluation, run_eval

    given = {"dtype": args.dtype, "max_model_len": args.max_model_len}
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
            text_encoder=args.text_encoder,
            max_tokens=args.max_tokens,
            prompt=args.prompt,
            add_special_tokens=args.add_special_tokens,
            engine_args={k: v for k, v in given.items() if v is not None} | args.engine_args,
            command=shlex.join(["anchorprune", *args.given]),
        )
    )


if __name__ == "__main__":
    sys.exit(main())

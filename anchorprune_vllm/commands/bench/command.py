# SPDX-License-Identifier: Apache-2.0
"""Arguments of `anchorprune bench`."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorprune_vllm.commands.checks import check_out
from anchorprune_vllm.commands.options import (
    add_budgets,
    add_dtype,
    add_methods,
    add_out,
    add_several,
    add_text_encoder,
    parsed_by,
    positive,
)

if TYPE_CHECKING:
    from anchorprune_vllm.commands.bench.served import ServedModel

_USAGE = "%(prog)s (--shape SHAPE | --model ID_OR_PATH) [OPTION ...]"
_SHAPES = ("llava-1.5", "llava-next", "qwen2.5-vl", "llava-video")


def add_bench(commands: Any) -> None:
    """Add the subcommand, with its own."""
    bench = commands.add_parser("bench", help="what pruning costs and brings in time and memory")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    _add_parts(kinds)
    _add_gpu_cost(kinds)
    _add_serve(kinds)
    _add_questions(kinds)
    _add_profile(kinds)


def _add_parts(kinds: Any) -> None:
    command = kinds.add_parser(
        "parts",
        help="selection, attention and memory by themselves, side by side",
        description="Time token selection side by side with a straightforward loop of the same "
        "method, with and without crops, and as a share of a vision-tower call; received attention "
        "against the tower that it is taken from; videos of two lengths; and the peak memory of "
        "pruned and unpruned calls. Eight minutes on two CPU cores.",
    )
    command.add_argument(
        "--repeats",
        type=positive,
        default=15,
        metavar="N",
        help="of each measurement (default: 15)",
    )
    command.add_argument(
        "--authors",
        type=Path,
        metavar="DIR",
        help="a clone of the paper's code (github.com/MULTI-cau/AnchorPrune): its selector is "
        "timed beside ours, for items without crops or frames",
    )
    command.add_argument(
        "--only",
        metavar="TABLE",
        help='one table alone, such as "received attention" (default: all of them)',
    )
    command.set_defaults(run=_parts)


def _add_gpu_cost(kinds: Any) -> None:
    command = kinds.add_parser(
        "gpu-cost",
        help="compute what choosing costs on an A100, H100 and L4; needs no GPU",
        description="Count what choosing tokens gives a GPU to do (launches, dependent steps, "
        "bytes, operations), and compute from that how long it takes on an A100, an H100 and an "
        "L4, beside the prefill of the pruned prompt. Nothing is measured. Takes seconds.",
    )
    command.set_defaults(run=_gpu_cost)


def _gpu_cost(args: argparse.Namespace) -> None:
    from anchorprune_vllm.commands.bench.gpu_cost import run_gpu_cost

    run_gpu_cost()


def _add_serve(kinds: Any) -> None:
    command = kinds.add_parser(
        "serve",
        help="vLLM under load, unpruned and pruned, one server after the other",
        usage=_USAGE,
        description="Start `vllm serve` unpruned, with free selection (the first K tokens, no "
        "signals: what pruning would be if choosing cost nothing), and with each method at each "
        "budget; put vLLM's own `vllm bench serve` to each of them. Writes DIR/results.json, "
        "table.md, budget.png and concurrency.png. Each measurement is kept as soon as it ends: "
        "the same command goes on where it was stopped, one with more methods or budgets adds to "
        "it.",
    )
    _add_model(command)
    add_methods(command, "; first is in every run, as free selection")
    add_budgets(command, "5.6%,11.1%")
    add_several(
        command,
        "--concurrency",
        _whole_numbers,
        [1, 8, 32],
        metavar="N",
        help="requests at once (default: 1 8 32)",
    )
    command.add_argument(
        "--requests",
        type=positive,
        default=12,
        metavar="N",
        help="of a measurement, and at least twice as many as are at once (default: 12)",
    )
    command.add_argument(
        "--question-tokens",
        type=positive,
        default=24,
        metavar="N",
        help="of random words (default: 24)",
    )
    command.add_argument(
        "--output-tokens", type=positive, default=8, metavar="N", help="of an answer (default: 8)"
    )
    command.add_argument(
        "--data",
        type=Path,
        metavar="FILE.jsonl",
        help="instead of random pictures and words: vLLM's format custom_image, with lines such as "
        '{"prompt": "...", "image_files": ["a.png"]}',
    )
    command.add_argument(
        "--repeat",
        type=positive,
        default=1,
        metavar="N",
        help="rounds over all servers (default: 1)",
    )
    command.add_argument(
        "--vllm-video-pruning",
        action="store_true",
        help="compare with vLLM's own --video-pruning-rate too (clips, and a model that vLLM "
        "prunes, as Qwen2.5-VL)",
    )
    command.set_defaults(run=_serve, when_stopped="; the same command goes on from here")


def _add_questions(kinds: Any) -> None:
    command = kinds.add_parser(
        "questions",
        help="one picture, many questions: time to first token of the further ones",
        usage=_USAGE,
        description="Ask several questions about one picture, one after the other: unpruned with "
        "and without vLLM's prefix cache, and with each method at each budget, with and without "
        "the feature cache. Writes "
        "DIR/questions.json.",
    )
    _add_model(command)
    add_methods(command)
    add_budgets(command, "11.1%")
    command.add_argument(
        "--questions", type=_at_least_two, default=20, metavar="N", help="(default: 20)"
    )
    command.set_defaults(run=_questions)


def _add_profile(kinds: Any) -> None:
    command = kinds.add_parser(
        "profile",
        help="where the time of one request goes",
        usage=_USAGE,
        description="Take the time of one request up to its first token apart, stage by stage: "
        "unpruned, with free selection, and with each method at each budget, in engines in this "
        "process that are asked in turns. Writes DIR/profile.json.",
    )
    _add_model(command)
    add_methods(command)
    add_budgets(command, "11.1%")
    command.add_argument(
        "--requests", type=positive, default=12, metavar="N", help="of each (default: 12)"
    )
    command.set_defaults(run=_profile)


def _add_model(command: Any) -> None:
    """What is served, and where results go."""
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--shape",
        choices=_SHAPES,
        help="random weights in the proportions of the 7B model, scaled down",
    )
    which.add_argument("--model", metavar="ID_OR_PATH", help="a real checkpoint")
    command.add_argument(
        "--scale",
        type=_scale,
        metavar="NUMBER",
        help="of a shape: 1 is a language model of about 105 M parameters (default: 1; llava-next "
        "and llava-video 0.3)",
    )
    command.add_argument(
        "--media",
        type=_media,
        metavar="WxH[xFRAMES]",
        help="of a request: a picture of this size, or a clip (default: the shape's; with --model "
        "672x672)",
    )
    add_text_encoder(command)
    add_dtype(command, "vLLM's; of a shape bfloat16, on a CPU float32")
    command.add_argument(
        "--server-args",
        type=_words,
        default=[],
        metavar="FLAGS",
        help="further flags of every vllm serve, in one string: --server-args='--flag value'",
    )
    command.add_argument(
        "--start-seconds",
        type=positive,
        default=1800,
        metavar="N",
        help="a server may take (default: 1800)",
    )
    add_out(command, None, "bench-results/NAME OF THE MODEL")
    command.add_argument(
        "--models",
        type=Path,
        default=Path(".demo"),
        metavar="DIR",
        help="for shapes (default: .demo)",
    )


def _parts(args: argparse.Namespace) -> None:
    # vLLM, torch's profiler and transformers would write between the tables.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from anchorprune_vllm.commands.bench.parts import run_parts

    run_parts(args.repeats, args.authors, args.only)


def _serve(args: argparse.Namespace) -> None:
    out, model = _out(args), _served_model(args)
    from anchorprune_vllm.commands.bench.load import Load
    from anchorprune_vllm.commands.bench.serve import Benchmark, run_serve

    own = args.shape == "qwen2.5-vl" and model.media.frames > 1
    if args.vllm_video_pruning and model.media.frames == 1:
        raise ValueError("--vllm-video-pruning needs clips: give --media WxHxFRAMES")
    if args.vllm_video_pruning:
        model.check_vllm_prunes()
    run_serve(
        Benchmark(
            model=model,
            load=Load(
                model.media, args.data, args.question_tokens, args.output_tokens, args.requests
            ),
            methods=args.methods,
            budgets=args.budgets,
            concurrencies=sorted(args.concurrency),
            rounds=args.repeat,
            out=out,
            with_vllm=args.vllm_video_pruning or own,
            command=shlex.join(["anchorprune", *args.given]),
        )
    )


def _questions(args: argparse.Namespace) -> None:
    out, model = _out(args), _served_model(args)
    from anchorprune_vllm.commands.bench.questions import run_questions

    command = shlex.join(["anchorprune", *args.given])
    run_questions(model, args.methods, args.budgets, args.questions, out, command)


def _profile(args: argparse.Namespace) -> None:
    out, model = _out(args), _served_model(args)
    from anchorprune_vllm.commands.bench.profile import run_profile

    command = shlex.join(["anchorprune", *args.given])
    run_profile(model, args.methods, args.budgets, args.requests, out, command)


def _served_model(args: argparse.Namespace) -> ServedModel:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from anchorprune_vllm.commands.bench.served import served_model

    return served_model(
        shape=args.shape,
        model=args.model,
        scale=args.scale,
        media=args.media,
        text_encoder=args.text_encoder,
        server_args=[*(["--dtype", args.dtype] if args.dtype else []), *args.server_args],
        directory=args.models,
        start_seconds=args.start_seconds,
    )


def _out(args: argparse.Namespace) -> Path:
    out: Path = args.out or Path("bench-results") / (args.shape or Path(args.model).name)
    check_out(out)
    return out


@parsed_by
def _media(text: str) -> Any:
    from anchorprune_vllm.commands.bench.shapes import Media

    return Media.parse(text)


@parsed_by
def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.001 <= scale <= 100:
        raise ValueError(f"{text!r} is not a number from 0.001 to 100")
    return scale


@parsed_by
def _at_least_two(text: str) -> int:
    if positive(text) < 2:
        raise ValueError("give at least 2 questions: the first is not a further one")
    return int(text)


@parsed_by
def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be split into words ({error})") from error


def _whole_numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]

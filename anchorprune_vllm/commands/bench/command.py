# SPDX-License-Identifier: Apache-2.0
"""The arguments of `anchorprune bench`."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorprune_vllm.commands import options
from anchorprune_vllm.commands.checks import check_out

if TYPE_CHECKING:
    from anchorprune_vllm.commands.bench.served import Comparison
    from anchorprune_vllm.commands.bench.shapes import MediaSize

_SHAPES = ("llava-1.5", "llava-next", "qwen2.5-vl", "llava-video")


def add_bench(commands: Any) -> None:
    """Add `bench` and its kinds to the subcommands of `anchorprune`."""
    bench = commands.add_parser("bench", help="measure what pruning costs and saves")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    _add_parts(kinds)
    _add_gpu_cost(kinds)
    _add_serve(kinds)
    _add_questions(kinds)
    _add_profile(kinds)


def _add_parts(kinds: Any) -> None:
    command = kinds.add_parser(
        "parts",
        help="time and memory of selection, received attention and videos by themselves",
        description="Time token selection next to a straightforward loop of the same method, and "
        "received attention next to the tower that it is taken from. Embed videos of two lengths, "
        "pruned and unpruned, and measure the peak memory. Takes eight minutes on two CPU cores.",
    )
    _add_count(command, "--repeats", 15, "how often to take each time")
    authors = "a clone of github.com/MULTI-cau/AnchorPrune, to time the authors' selector too"
    command.add_argument("--authors", type=Path, metavar="DIR", help=authors)
    only = 'print one table, such as "received attention" (default: all of them)'
    command.add_argument("--only", metavar="TABLE", help=only)
    command.set_defaults(run=_parts)


def _add_gpu_cost(kinds: Any) -> None:
    command = kinds.add_parser(
        "gpu-cost",
        help="compute what selection costs on an A100, H100 and L4; needs no GPU",
        description="Count what token selection gives a GPU to do (launches, dependent steps, "
        "bytes, operations), and compute from that how long it takes on an A100, an H100 and an "
        "L4, next to the prefill of the pruned prompt. Nothing is measured. Takes seconds.",
    )
    command.set_defaults(run=_gpu_cost)


def _add_serve(kinds: Any) -> None:
    command = _add_served(
        *(kinds, "serve", _serve, "5.6%,11.1%"),
        help="put load on vLLM, unpruned and pruned, one server after the other",
        description="Start `vllm serve` unpruned, with free selection (the method first, which "
        "keeps the first K tokens and costs nothing), and with each method at each budget, and run "
        "vLLM's own `vllm bench serve` on each of them. Writes DIR/results.json, table.md, "
        "budget.png and concurrency.png. Each measurement is kept as soon as it ends: the same "
        "command continues where it was stopped, and one with more methods or budgets adds to it.",
    )
    options.add_several(
        *(command, "--concurrency", _whole_numbers, [1, 8, 32]),
        metavar="N",
        help="numbers of requests at once (default: 1 8 32)",
    )
    _add_count(command, "--requests", 12, "requests of a measurement, at least 2 x --concurrency")
    _add_count(command, "--question-tokens", 24, "tokens of random words in a request")
    _add_count(command, "--output-tokens", 8, "tokens of an answer")
    _add_count(command, "--repeat", 1, "rounds over all servers")
    data = (
        "requests in vLLM's format custom_image, instead of random ones: lines such as "
        '{"prompt": "...", "image_files": ["a.png"]}'
    )
    command.add_argument("--data", type=Path, metavar="FILE.jsonl", help=data)
    video = "compare with vLLM's own --video-pruning-rate too, for videos and a model it prunes"
    command.add_argument("--vllm-video-pruning", action="store_true", help=video)
    command.set_defaults(when_stopped="; the same command goes on from here")


def _add_questions(kinds: Any) -> None:
    command = _add_served(
        *(kinds, "questions", _questions, "11.1%"),
        help="ask many questions about one image, and time the first token of each",
        description="Ask several questions about one image, one after the other: unpruned with and "
        "without vLLM's prefix cache, and with each method at each budget, with and without the "
        "feature cache. Writes DIR/questions.json.",
    )
    _add_count(command, "--questions", 20, "how many questions to ask", _at_least_two)


def _add_profile(kinds: Any) -> None:
    command = _add_served(
        *(kinds, "profile", _profile, "11.1%"),
        help="show where the time of one request goes",
        description="Break down the time of one request up to its first token, stage by stage: "
        "unpruned, with free selection, and with each method at each budget, in engines in this "
        "process that take turns. Writes DIR/profile.json.",
    )
    _add_count(command, "--requests", 12, "requests to each engine")


def _add_served(
    kinds: Any, name: str, run: Callable[..., None], budgets: str, **texts: str
) -> argparse.ArgumentParser:
    """Add a benchmark that serves a model, with the arguments that all of these have."""
    usage = "%(prog)s (--shape SHAPE | --model ID_OR_PATH) [OPTION ...]"
    command: argparse.ArgumentParser = kinds.add_parser(name, usage=usage, **texts)
    command.set_defaults(run=run)
    which = command.add_mutually_exclusive_group(required=True)
    shape = "serve random weights in the proportions of the 7B model, scaled down"
    which.add_argument("--shape", choices=_SHAPES, help=shape)
    which.add_argument("--model", metavar="ID_OR_PATH", help="serve a real checkpoint")
    scale = "size of a shape: 1 is 105 M parameters (default: 1; llava-next and llava-video 0.3)"
    command.add_argument("--scale", type=_scale, metavar="NUMBER", help=scale)
    media = "size of the image or video in a request (default: the shape's; with --model 672x672)"
    command.add_argument("--media", type=_media, metavar="WxH[xFRAMES]", help=media)
    options.add_text_encoder(command)
    options.add_methods(command)
    options.add_budgets(command, budgets)
    options.add_dtype(command, "vLLM's; of a shape bfloat16, on a CPU float32")
    flags = "further flags of every vllm serve, in one string: --server-args='--flag value'"
    command.add_argument("--server-args", type=_words, default=[], metavar="FLAGS", help=flags)
    _add_count(command, "--start-seconds", 1800, "seconds that a server may take to start")
    options.add_out(command, None, "bench-results/NAME OF THE MODEL")
    models = "where to make the checkpoints of shapes (default: .demo)"
    command.add_argument("--models", type=Path, default=Path(".demo"), metavar="DIR", help=models)
    return command


def _add_count(
    command: Any, flag: str, default: int, text: str, parse: Callable[..., int] = options.positive
) -> None:
    text = f"{text} (default: {default})"
    command.add_argument(flag, type=parse, default=default, metavar="N", help=text)


def _parts(args: argparse.Namespace) -> None:
    # vLLM, torch's profiler and transformers would write between the tables.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from anchorprune_vllm.commands.bench.parts import run_parts

    run_parts(args.repeats, args.authors, args.only)


def _gpu_cost(args: argparse.Namespace) -> None:
    from anchorprune_vllm.commands.bench.gpu_cost import run_gpu_cost

    run_gpu_cost()


def _serve(args: argparse.Namespace) -> None:
    compared = _comparison(args)
    from anchorprune_vllm.commands.bench.load import Load
    from anchorprune_vllm.commands.bench.serve import ServeComparison, run_serve

    media = compared.model.media
    if args.vllm_video_pruning and media.frames == 1:
        raise ValueError("--vllm-video-pruning needs videos: give --media WxHxFRAMES")
    if args.vllm_video_pruning:
        compared.model.check_vllm_prunes()
    with_vllm = args.vllm_video_pruning or (args.shape == "qwen2.5-vl" and media.frames > 1)
    sizes = (args.question_tokens, args.output_tokens, args.requests)
    load = Load(media, args.data, *sizes, sorted(args.concurrency))
    run_serve(ServeComparison(**vars(compared), load=load, rounds=args.repeat, with_vllm=with_vllm))


def _questions(args: argparse.Namespace) -> None:
    compared = _comparison(args)
    from anchorprune_vllm.commands.bench.questions import run_questions

    run_questions(compared, args.questions)


def _profile(args: argparse.Namespace) -> None:
    compared = _comparison(args)
    from anchorprune_vllm.commands.bench.profile import run_profile

    run_profile(compared, args.requests)


def _comparison(args: argparse.Namespace) -> Comparison:
    """Find or make the model; raise ValueError for arguments that do not go together."""
    out = args.out or Path("bench-results") / (args.shape or Path(args.model).name)
    check_out(out)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from anchorprune_vllm.commands.bench.served import Comparison, checkpoint, random_model

    flags = [*(["--dtype", args.dtype] if args.dtype else []), *args.server_args]
    if args.model:
        if args.scale is not None:
            raise ValueError("--scale is for --shape: a checkpoint has the size that it has")
        model = checkpoint(args.model, args.media, args.text_encoder, flags)
    else:
        if args.text_encoder is not None:
            raise ValueError("--text-encoder is for --model: a shape brings its own")
        wanted = (args.shape, args.scale, args.media)
        model = random_model(*wanted, flags, args.models)
    model = replace(model, start_seconds=args.start_seconds)
    command = shlex.join(["anchorprune", *args.given])
    return Comparison(model, args.methods, args.budgets, out, command)


@options.parsed_by
def _media(text: str) -> MediaSize:
    from anchorprune_vllm.commands.bench.shapes import MediaSize

    return MediaSize.parse(text)


@options.parsed_by
def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.001 <= scale <= 100:
        raise ValueError(f"{text!r} is not a number from 0.001 to 100")
    return scale


@options.parsed_by
def _at_least_two(text: str) -> int:
    if options.positive(text) < 2:
        raise ValueError("give at least 2 questions: the first is not a further one")
    return int(text)


@options.parsed_by
def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be split into words ({error})") from error


def _whole_numbers(text: str) -> list[int]:
    return [options.positive(part) for part in text.split(",")]

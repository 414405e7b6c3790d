# SPDX-License-Identifier: Apache-2.0
"""Soak models: `python -m tests.soak [NAME …]`, or `make soak`.

Each is served pruned by one engine that is short of everything. Requests of all kinds are made to
it, alone and many at once, and their answers must equal those that the same engine gave to each
request alone when it had forgotten everything. A model that ran to its end is not run again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import vllm

from anchorprune_vllm.commands.results_file import write_json
from anchorprune_vllm.testing.demo_models.make import DEMO_MODELS
from tests.soak.serving import Settings, Soak, soak_model
from tests.support.own_process import run_in_process
from tests.support.runners import RUNNERS

ROOT = Path(__file__).parents[2]
FIRST_CLASS = (
    *("qwen3.5", "qwen3-vl", "qwen3-vl-moe", "qwen2-vl", "internvl", "internvl-chat"),
    *("gemma3", "gemma4", "glm-4v", "mistral3", "pixtral", "llama4", "smolvlm", "idefics3"),
)
MODELS = (*FIRST_CLASS, *DEMO_MODELS)
_START_SECONDS = 600
"""The time for an engine's start and its cold answers, which comes on top of the minutes."""
_DRAWN = ("seed", "pool", "runner", "requests")
_COUNTS = ("preemptions", "prefix tokens", "hits", "misses", "evictions")


def main(argv: Sequence[str] | None = None) -> int:
    """Soak what is left, print a table, and return 1 if any answer differs."""
    args = _parser().parse_args(argv)
    settings = Settings(**{each.name: getattr(args, each.name) for each in fields(Settings)})
    results = args.directory / vllm.__version__
    results.mkdir(parents=True, exist_ok=True)
    soaks = []
    for name in args.names:
        file = results / f"{name}-{settings.runner}.json"
        soak = None if args.again else _finished(file, settings)
        if soak is None:
            soak = run_soak(name, file, settings)
            print(flush=True)
        soaks.append(soak)
    print(table_of(soaks))
    for soak in soaks:
        if soak.differing:
            print(reproduce(soak))
    return int(not all(soak.is_well for soak in soaks))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    option = parser.add_argument
    option("names", nargs="*", metavar="NAME", help="of tiny checkpoints (default: the main ones)")
    option("--requests", type=int, metavar="N", help="of each model (default: 2000)")
    option("--minutes", type=float, metavar="M", help="at most, of each model (default: 15)")
    option("--pool", type=int, metavar="N", help="distinct ones among them (default: 150)")
    option("--seed", type=int, metavar="S", help="of all that is drawn (default: 0)")
    option("--runner", choices=RUNNERS, help="vLLM's model runner (default: V1)")
    option("--again", action="store_true", help="also models that ran to their end already")
    option("--directory", type=Path, default=ROOT / ".soak", help="for results (default: .soak)")
    parser.set_defaults(names=[*MODELS], **asdict(Settings()))
    return parser


def _finished(file: Path, settings: Settings) -> Soak | None:
    """Return the result of a model that ran with these settings, or with more requests."""
    if not file.exists():
        return None
    soak = Soak(**json.loads(file.read_text(encoding="utf-8")))
    wanted = {**vars(settings), "requests": 0, "minutes": 0}
    is_same = {**soak.settings, "requests": 0, "minutes": 0} == wanted
    is_enough = soak.requests >= settings.requests or soak.settings == vars(settings)
    return soak if soak.is_finished and is_same and is_enough else None


def run_soak(name: str, file: Path, settings: Settings) -> Soak:
    """Soak a model in a process of its own, and keep the result."""
    work = run_in_process(
        _soak_in_scratch,
        *(name, settings),
        log=file.with_suffix(".log"),
        time_limit=60 * settings.minutes + _START_SECONDS,
        listen=_show,
    )
    soak = work.told or Soak(name, vars(settings))
    if work.ending != "ended":
        soak.is_finished, soak.why = False, work.why
    write_json(file, asdict(soak))
    return soak


def _soak_in_scratch(name: str, settings: Settings) -> Iterator[Soak]:
    with tempfile.TemporaryDirectory() as scratch:
        yield from soak_model(name, Path(scratch), settings)


def _show(soak: Soak) -> None:
    """Write the line of progress, over the one before on a terminal."""
    line = (
        f"{soak.model}: {soak.requests:,} of {soak.settings['requests']:,} requests, "
        f"{soak.different} differ, {soak.seconds:.0f} s"
    )
    if sys.stdout.isatty():
        print(f"\r{line:78}", end="", flush=True)
    elif soak.is_finished or not soak.requests:
        print(line, flush=True)


def table_of(soaks: Sequence[Soak]) -> str:
    """Return the final table."""
    titles = ("model", "requests", "equal", "near-ties", "differ", *_COUNTS, "seconds", "")
    rows = [
        (
            *(soak.model, soak.requests, soak.equal, soak.near_ties, soak.different),
            *(soak.counts.get(name, "") for name in _COUNTS),
            *(round(soak.seconds), soak.why),
        )
        for soak in soaks
    ]
    lines = [tuple(map(str, row)) for row in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{line[0]:{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(line[1:-1], widths[1:], strict=False))
        + f"  {line[-1]}".rstrip()
        for line in lines
    )


def reproduce(soak: Soak) -> str:
    """Say which request was answered otherwise, and how to ask it again."""
    first, settings = soak.differing[0], soak.settings
    cold, warm = (first[each]["tokens"] for each in ("cold", "warm"))
    how = "its logprobs differ" if cold == warm else f"{warm}, and alone {cold}"
    options = " ".join(f"--{name} {settings[name]}" for name in _DRAWN)
    return (
        f"{soak.model}: request {first['place']:,} has another answer than when it was asked alone "
        f"({how}): {json.dumps(first['asked'])}. To see it again: "
        f"python -m tests.soak {soak.model} --again {options}"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `kill` ends the soak too
    sys.exit(main())

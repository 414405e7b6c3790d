# SPDX-License-Identifier: Apache-2.0
"""Options that several subcommands share, so that each is spelled and read in one way."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from anchorprune_vllm.budget import Budget
from anchorprune_vllm.commands.chosen_methods import parse_methods
from anchorprune_vllm.methods import registry

PREFIX = "anchorprune: "
"""Start of the plugin's error messages; the command prints its own name before every error."""

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
"""vLLM's own list, copied because importing vLLM takes seconds."""

DEMO_ARCHITECTURES = ("llava-1.5", "llava-next", "qwen2.5-vl", "llava-onevision", "llava-video")
"""Names of `DEMO_MODELS` in `testing.demo_models.make`, copied because it imports torch."""

_Settings = TypeVar("_Settings")


class Parser(argparse.ArgumentParser):
    """An argument parser that accepts only whole flags and suggests the one that was meant.

    Abbreviations are refused because argparse would let the last of `--method A --methods B` win.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here, in the subcommand's parser, which knows similar flags."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._refusal(unknown[0]))
        return found, unknown

    def _refusal(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} is one argument too many; arguments without a flag come first"
        near = get_close_matches(word.partition("=")[0], self._option_string_actions, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        return f"there is no {word}: {meant}{self.prog} --help lists all"


# -- values ---------------------------------------------------------------------------------------


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parsed_by(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argument type that shows the message of the ValueError that `parse` raises."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(PREFIX)) from error

    return parsed


@parsed_by
def budgets(text: str) -> list[str]:
    """Read budgets that are separated by commas."""
    return [str(Budget.parse(part)) for part in text.split(",")]


def choices(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Return an argument type for some of the allowed words, separated by commas."""

    def parse(text: str) -> list[str]:
        parts = text.split(",")
        for part in parts:
            if part not in allowed:
                raise ValueError(f"{part!r} is not one of {', '.join(allowed)}")
        return parts

    return parsed_by(parse)


@parsed_by
def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    allowed = 'give a JSON object such as {"seed": 1}'
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON ({error}): {allowed}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object: {allowed}")
    return value


# -- options --------------------------------------------------------------------------------------


class _Several(argparse.Action):
    """Collects the values of all occurrences of a flag; a value given twice counts once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        found = [] if before is self.default else before
        for value in chain.from_iterable(values):
            if value not in found:
                found.append(value)
        setattr(namespace, self.dest, found)


def add_several(
    command: Any, flag: str, parse: Callable[[str], list[Any]], default: list[Any], **options: Any
) -> None:
    """Add a flag that takes several values; `parse` reads one word, which may hold several too."""
    command.add_argument(flag, nargs="+", action=_Several, type=parse, default=default, **options)


def add_methods(command: Any, note: str = "") -> None:
    """Add `--methods`."""
    add_several(
        command,
        "--methods",
        parsed_by(lambda text: parse_methods([text])),
        parse_methods([registry.ANCHORPRUNE]),
        metavar="METHOD",
        help=f"methods as NAME or NAME:key=value,key=value, or all{note} (default: anchorprune). "
        f"Names: {', '.join(registry.names())}. "
        "Example: --methods divprune anchorprune:tau=0.1,patience=2",
    )


def add_budgets(command: Any, default: str, note: str = "") -> None:
    """Add `--budgets`."""
    shown = default.replace(",", " ").replace("%", "%%")
    add_several(
        command,
        "--budgets",
        budgets,
        budgets(default),
        metavar="K",
        help="how many visual tokens to keep of an item: a whole number, or a share such as "
        f"11.1%%{note} (default: {shown})",
    )


def add_text_encoder(command: Any) -> None:
    """Add `--text-encoder`."""
    command.add_argument(
        "--text-encoder",
        metavar="ID_OR_PATH",
        help="the paired CLIP or SigLIP, as --anchorprune-text-encoder of vllm serve (default: "
        "MODEL/clip or MODEL/siglip if it exists, else the known one)",
    )


def add_dtype(command: Any, default: str) -> None:
    """Add `--dtype`, which is None by default; `default` says what that means."""
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        help=f"dtype of the model: {', '.join(DTYPES)} (default: {default})",
    )


def add_engine_args(command: Any) -> None:
    """Add `--dtype`, `--max-model-len` and `--engine-args`, which `engine_args` combines."""
    add_dtype(command, "the model's own; float32 on a CPU")
    command.add_argument(
        "--max-model-len", type=positive, metavar="N", help="longest context of the engine"
    )
    command.add_argument(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help='further arguments of vLLM, such as {"trust_remote_code": true}',
    )


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """Combine the values of `add_engine_args`; raise ValueError for one that is given twice."""
    flags = {"dtype": args.dtype, "max_model_len": args.max_model_len}
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given.keys() & args.engine_args.keys():
        raise ValueError(
            f"--{name.replace('_', '-')} is {given[name]}, and --engine-args has {name} too: give "
            "one of them"
        )
    return given | args.engine_args


def add_out(command: Any, default: Path | None, shown: str) -> None:
    """Add `--out` to a command that writes several files."""
    command.add_argument(
        "--out", type=Path, default=default, metavar="DIR", help=f"for results (default: {shown})"
    )


def settings_of(args: argparse.Namespace, kind: type[_Settings], **others: Any) -> _Settings:
    """Make a dataclass of the arguments named like its fields; `others` come before them."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{k: v for k, v in vars(args).items() if k in names} | others)

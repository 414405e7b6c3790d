# SPDX-License-Identifier: Apache-2.0
"""Arguments that several subcommands take: each is spelled and read in one way."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from anchorprune_vllm.budget import Budget
from anchorprune_vllm.commands.chosen_methods import parse_methods
from anchorprune_vllm.methods import registry

PREFIX = "anchorprune: "
"""Of the plugin's own errors, which vLLM prints; the command puts its name before all errors."""

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
"""vLLM's; importing it for them would take seconds."""


class Parser(argparse.ArgumentParser):
    """Takes flags by their whole names alone, and says which one may have been meant.

    Of an abbreviation such as `--method` for `--methods`, only the last would count.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is not known here, where the subcommand's own flags are known."""
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


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parsed_by(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """As an argument's type: with the words of the ValueError."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(PREFIX)) from error

    return parsed


@parsed_by
def budgets(text: str) -> list[str]:
    """Budgets, separated by commas."""
    return [str(Budget.parse(part)) for part in text.split(",")]


def choices(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of the words, separated by commas."""

    def parse(text: str) -> list[str]:
        parts = text.split(",")
        for part in parts:
            if part not in allowed:
                raise ValueError(f"{part!r} is not one of {', '.join(allowed)}")
        return parts

    return parsed_by(parse)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    allowed = 'give a JSON object such as {"seed": 1}'
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}): {allowed}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object: {allowed}")
    return value


class _Several(argparse.Action):
    """All values behind a flag, wherever it is given; what is given twice counts once."""

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
    """A flag with several values behind it; `parse` reads one word, which may hold several too."""
    command.add_argument(flag, nargs="+", action=_Several, type=parse, default=default, **options)


def add_methods(command: Any, note: str = "") -> None:
    """`--methods`"""
    add_several(
        command,
        "--methods",
        parsed_by(lambda text: parse_methods([text])),
        parse_methods([registry.ANCHORPRUNE]),
        metavar="METHOD",
        help=f"NAME or NAME:key=value,key=value; names: {', '.join(registry.names())}, or all "
        f"(default: anchorprune){note}. Example: --methods divprune anchorprune:tau=0.1,patience=2",
    )


def add_budgets(command: Any, default: str, note: str = "") -> None:
    """`--budgets`"""
    add_several(
        command,
        "--budgets",
        budgets,
        budgets(default),
        metavar="K",
        help="tokens kept: whole numbers or shares"
        f"{note} (default: {default.replace(',', ' ').replace('%', '%%')})",
    )


def add_text_encoder(command: Any) -> None:
    """`--text-encoder`"""
    command.add_argument(
        "--text-encoder",
        metavar="ID_OR_PATH",
        help="as --anchorprune-text-encoder of vllm serve (default: MODEL/clip or MODEL/siglip if "
        "there, else what is known)",
    )


def add_dtype(command: Any, default: str) -> None:
    """`--dtype`; `default` in words: None is what is parsed."""
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        help=f"of the model: {', '.join(DTYPES)} (default: {default})",
    )


def add_engine_args(command: Any) -> None:
    """`--dtype`, `--max-model-len` and `--engine-args`, which `engine_args` puts together."""
    add_dtype(command, "its own; on a CPU float32")
    command.add_argument("--max-model-len", type=positive, metavar="N", help="of the engine")
    command.add_argument(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help='further arguments of vLLM, such as {"trust_remote_code": true}',
    )


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_engine_args` was given; ValueError if a value is given in both ways."""
    flags = {"dtype": args.dtype, "max_model_len": args.max_model_len}
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given.keys() & args.engine_args.keys():
        raise ValueError(
            f"--{name.replace('_', '-')} is {given[name]}, and --engine-args has {name} too: give "
            "one of them"
        )
    return given | args.engine_args


def add_out(command: Any, default: Path | None, shown: str) -> None:
    """`--out` of a command that writes several files."""
    command.add_argument(
        "--out", type=Path, default=default, metavar="DIR", help=f"for results (default: {shown})"
    )

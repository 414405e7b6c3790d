# SPDX-License-Identifier: Apache-2.0
"""What several subcommands take: the same words mean the same to all of them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from vllm.config.model import ModelDType

from anchorprune_vllm.commands.chosen_methods import ChosenMethod
from anchorprune_vllm.commands.main import _parser, main
from anchorprune_vllm.commands.options import DTYPES, engine_args

SERVE = ("bench", "serve", "--shape", "llava-1.5")
QUESTIONS = ("bench", "questions", "--shape", "llava-1.5")
EVAL, EXPLAIN = ("eval", "m"), ("explain", "m", "a.png", "Why?")
ALL = (EVAL, EXPLAIN, SERVE, QUESTIONS)


def parse(*args: str) -> Any:
    return _parser().parse_args(args)


@pytest.mark.parametrize("command", ALL)
@pytest.mark.parametrize(
    "given",
    [
        ["--methods", "scope", "anchorprune:tau=0.1,patience=2", "--budgets", "8", "5.60%"],
        ["--methods", "scope,anchorprune:tau=0.1,patience=2", "--budgets", "8,5.6%"],
        [
            *("--methods", "scope", "--budgets", "8", "8"),
            *("--methods", "anchorprune:patience=2,tau=0.1", "scope", "--budgets=5.6%"),
        ],
    ],
)
def test_methods_and_budgets(command: tuple[str, ...], given: list[str]) -> None:
    args = parse(*command, *given)
    assert args.methods == [
        ChosenMethod("scope"),
        ChosenMethod("anchorprune", (("patience", 2), ("tau", 0.1))),
    ]
    assert args.budgets == ["8", "5.6%"]


@pytest.mark.parametrize("command", ALL)
def test_defaults_are_not_added_to(command: tuple[str, ...]) -> None:
    default = parse(*command)
    assert default.methods == [ChosenMethod("anchorprune")]
    assert "11.1%" in default.budgets
    assert parse(*command, "--methods", "scope", "--budgets", "8").budgets == ["8"]
    assert parse(*command).methods == default.methods


@pytest.mark.parametrize("command", ALL)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--dtype", "float99"], "argument --dtype: invalid choice: 'float99' (choose from 'auto'"),
        (["--methods", "foo"], "argument --methods: method must be one of anchorprune, visionzip"),
        (["--methods", "foo"], "got 'foo'"),
        (["--methods", "anchorprune:tau=9"], "argument --methods: tau must be a number from 0 to"),
        (["--methods", "anchorprune:x=1"], "argument --methods: unknown setting 'x'; allowed: "),
        (["--methods", "scope:alpa=1"], "has no option 'alpa' (did you mean 'alpha'?); it has: al"),
        (["--methods"], "argument --methods: expected at least one argument"),
        (
            ["--budgets", "0"],
            "argument --budgets: Budget '0' is not allowed: give a positive whole",
        ),
        (["--budgets", "-3"], "argument --budgets: Budget '-3' is not allowed"),
        (["--budgets", "8", "abc"], "argument --budgets: Budget 'abc' is not allowed"),
        (["--budgets", "150%"], "argument --budgets: Budget '150%' is not allowed"),
        (["--budgets", "8,"], "argument --budgets: Budget '' is not allowed"),
        (["--method", "scope"], "there is no --method: did you mean --methods? anchorprune "),
        (["--budget=8"], "there is no --budget=8: did you mean --budgets? anchorprune "),
        (["--fnord"], "there is no --fnord: anchorprune "),
    ],
)
def test_refusals(
    command: tuple[str, ...], given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, *given])
    assert ended.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: anchorprune ")
    assert line.startswith("anchorprune ")
    assert words in line


@pytest.mark.parametrize("command", [EVAL, EXPLAIN])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{bad", "--engine-args: '{bad' is not JSON (Expecting property name"),
        ("[1]", "--engine-args: '[1]' is not a JSON object: give a JSON object such as {"),
    ],
)
def test_engine_args_that_are_none(
    command: tuple[str, ...], given: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--engine-args", given])
    assert words in capsys.readouterr().err


def test_engine_args_are_put_together() -> None:
    given = ["--dtype", "half", "--max-model-len", "512", "--engine-args", '{"seed": 1}']
    for command in (EVAL, EXPLAIN):
        found = {"dtype": "half", "max_model_len": 512, "seed": 1}
        assert engine_args(parse(*command, *given)) == found
        assert engine_args(parse(*command)) == {}


def test_a_value_is_given_once() -> None:
    args = parse(*EVAL, "--dtype", "half", "--engine-args", '{"dtype": "float32"}')
    with pytest.raises(ValueError, match="--dtype is half, and --engine-args has dtype too: give"):
        engine_args(args)


def test_dtypes_are_vllms() -> None:
    assert get_args(ModelDType) == DTYPES


def test_one_argument_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*EXPLAIN, "more"])
    words = "'more' is one argument too many; arguments without a flag come first"
    assert words in capsys.readouterr().err

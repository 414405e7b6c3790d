# SPDX-License-Identifier: Apache-2.0
"""The flags, through vLLM's own parser and `EngineArgs`."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser

import anchorprune_vllm
from anchorprune_vllm.log import logger


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    anchorprune_vllm.register()
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))


def overrides(parser: FlexibleArgumentParser, *flags: str) -> object:
    # A model that is a path: no hub is asked for it.
    args = parser.parse_args(["--model", ".", *flags])
    return EngineArgs.from_cli_args(args).hf_overrides


def test_no_flag_changes_nothing(parser: FlexibleArgumentParser) -> None:
    assert overrides(parser) == {}


def test_all_flags(parser: FlexibleArgumentParser) -> None:
    given = overrides(
        parser,
        *("--anchorprune-budget", "11.1%", "--anchorprune-video-budget", "256"),
        *("--anchorprune-method", "anchorprune", "--anchorprune-query", "last"),
        *("--anchorprune-text-encoder", "org/clip", "--anchorprune-config", '{"tau": 0.3}'),
    )
    assert given == {
        "anchorprune": {
            "budget": "11.1%",
            "video_budget": "256",
            "method": "anchorprune",
            "query": "last",
            "text_encoder": "org/clip",
            "tau": 0.3,
        }
    }


def test_users_own_overrides_stay(parser: FlexibleArgumentParser) -> None:
    own = {"rope_theta": 1.0, "anchorprune": {"tau": 0.1, "patience": 5}}
    flags = ("--anchorprune-budget", "64", "--anchorprune-config", '{"tau": 0.3}')
    given = overrides(parser, *flags, "--hf-overrides", json.dumps(own))
    assert given == {
        "rope_theta": 1.0,
        "anchorprune": {"tau": 0.3, "patience": 5, "budget": "64"},
    }


def test_a_budget_in_the_config_is_enough(parser: FlexibleArgumentParser) -> None:
    given = overrides(parser, "--anchorprune-config", '{"budget": 32}')
    assert given == {"anchorprune": {"budget": 32}}


def test_flags_without_budget_are_inert_and_say_so(
    parser: FlexibleArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning_once", lambda text, *args: lines.append(text % args))
    assert overrides(parser, "--anchorprune-query", "last") == {}
    (line,) = lines
    assert "without --anchorprune-budget these flags have no effect: --anchorprune-query" in line


def test_bad_values_end_in_one_line(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for flag, value, words in (
        *(
            ("--anchorprune-budget", value, f"Budget {value!r} is not allowed: give a positive")
            for value in ("0", "-1", "1.5", "abc", "0%", "200%", "")
        ),
        ("--anchorprune-video-budget", "0", "Budget '0' is not allowed"),
        ("--anchorprune-method", "magic", "invalid choice: 'magic' (choose from"),
        ("--anchorprune-query", "words", "invalid choice: 'words' (choose from"),
        ("--anchorprune-config", "{tau", "settings must be JSON, got '{tau'"),
        ("--anchorprune-config", "[1]", "settings must be a dictionary"),
        ("--anchorprune-config", '{"tua": 1}', "unknown setting 'tua' (did you mean 'tau'?)"),
    ):
        with subtests.test(flag=flag, value=value):
            with pytest.raises(SystemExit):
                parser.parse_args(["--model", "m", f"{flag}={value}"])
            last = capsys.readouterr().err.strip().splitlines()[-1]
            assert last.startswith(f"vllm serve: error: argument {flag}: ")
            assert words in last


METHOD = ("--anchorprune-method", "hiprune")
OPTIONS = ("--anchorprune-config", '{"method_options": {"alpha": 0.5}}')
BUDGET = ("--anchorprune-budget", "64")


class TestSettingsTogether:
    """What flags and JSON say is checked once both are read, by the parser of `vllm serve`."""

    @pytest.fixture
    def serve(self) -> Callable[..., Any]:
        anchorprune_vllm.register()
        parser = FlexibleArgumentParser(prog="vllm")
        (command,) = cmd_init()
        command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
        return lambda *flags: parser.parse_args(["serve", "m", *flags]).hf_overrides["anchorprune"]

    def test_a_method_and_its_options(
        self, serve: Callable[..., Any], subtests: pytest.Subtests
    ) -> None:
        for order in permutations((METHOD, OPTIONS, BUDGET)):
            with subtests.test(order=order):
                given = serve(*(word for flag in order for word in flag))
                assert given == {
                    "budget": "64",
                    "method": "hiprune",
                    "method_options": {"alpha": 0.5},
                }

    def test_the_method_from_any_place(self, serve: Callable[..., Any]) -> None:
        own = json.dumps({"anchorprune": {"method": "hiprune"}})
        assert serve(*BUDGET, *OPTIONS, "--hf-overrides", own)["method"] == "hiprune"

    def test_a_flag_wins_over_the_json_and_that_over_the_overrides(
        self, serve: Callable[..., Any]
    ) -> None:
        own = json.dumps({"anchorprune": {"budget": 1, "query": "none", "tau": 0.1, "patience": 4}})
        config = json.dumps({"budget": 2, "query": "all", "tau": 0.3})
        flags = (*BUDGET, "--hf-overrides", own, "--anchorprune-config", config)
        assert serve(*flags) == {"budget": "64", "query": "all", "tau": 0.3, "patience": 4}

    def test_what_does_not_go_together_ends_in_one_line(
        self,
        serve: Callable[..., Any],
        capsys: pytest.CaptureFixture[str],
        subtests: pytest.Subtests,
    ) -> None:
        for flags, words in (
            (OPTIONS, "method_options are for the other methods"),
            ((*METHOD, "--anchorprune-config", '{"tau": 0.3}'), "tau is a setting of the method"),
            ((*METHOD, "--anchorprune-config", '{"method_options": {"alhpa": 1}}'), "'alpha'?"),
            (("--anchorprune-config", '{"tau": 9}'), "tau must be a number from 0 to 2, got 9"),
            (("--hf-overrides", '{"anchorprune": 5}'), "settings must be a dictionary such as"),
            (("--hf-overrides", '{"anchorprune": {"tua": 1}}'), "unknown setting 'tua'"),
        ):
            for other in (BUDGET, ("--anchorprune-query", "last")):
                with subtests.test(flags=flags, other=other):
                    with pytest.raises(SystemExit):
                        serve(*flags, *other)
                    last = capsys.readouterr().err.strip().splitlines()[-1]
                    assert last.startswith("vllm serve: error: anchorprune: ")
                    assert words in last


def test_a_budget_for_videos_alone(parser: FlexibleArgumentParser) -> None:
    args = parser.parse_args(["--model", "m", "--anchorprune-video-budget", "32"])
    assert args.hf_overrides == {"anchorprune": {"budget": "100%", "video_budget": "32"}}


def test_help_has_a_group(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {group.title: group for group in parser._action_groups}
    flags = [action.option_strings[0] for action in groups["AnchorPrune"]._group_actions]
    assert flags == [
        "--anchorprune-budget",
        "--anchorprune-video-budget",
        "--anchorprune-method",
        "--anchorprune-query",
        "--anchorprune-text-encoder",
        "--anchorprune-config",
    ]
    with pytest.raises(SystemExit):
        parser.parse_args(["--help=AnchorPrune"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "a share such as 10%" in shown
    assert "Other flags override the same settings here" in shown
    assert "(default: None)" not in shown  # what the defaults are is in the texts

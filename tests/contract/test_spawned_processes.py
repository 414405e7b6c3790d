# SPDX-License-Identifier: Apache-2.0
"""Settings reach processes that get parsed arguments before they load the plugin.

With several API servers (the default under data parallelism) vLLM spawns each with the parsed
arguments; `EngineArgs.from_cli_args` is the first thing such a process does.
"""

from __future__ import annotations

import multiprocessing
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.support.cli_args import make_arg_parser


def read_overrides(args: Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs.from_cli_args(args).hf_overrides


def test_settings_reach_a_spawned_api_server(tmp_path: Path) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", str(tmp_path), "--anchorprune-budget", "16"])
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as spawned:
        overrides = spawned.submit(read_overrides, args).result()
    assert overrides == {"anchorprune": {"budget": "16"}}


def test_flags_of_a_subcommand(tmp_path: Path) -> None:
    """`vllm serve` parses with a parser below another, and reads flags from a file too."""
    config = tmp_path / "serve.yaml"
    config.write_text("anchorprune-query: last\nhf-overrides: '{\"a\": 1}'\n")
    root = FlexibleArgumentParser()
    serve = root.add_subparsers(dest="subparser").add_parser("serve")
    make_arg_parser(serve)
    args = root.parse_args(["serve", "m", "--anchorprune-budget", "5%", "--config", str(config)])
    assert args.hf_overrides == {"a": 1, "anchorprune": {"budget": "5%", "query": "last"}}

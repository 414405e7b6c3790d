# SPDX-License-Identifier: Apache-2.0
"""examples/serve.sh: what it would run, and that `make serve` is the same."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

import anchorprune_vllm
from tests.support.cli_args import make_arg_parser
from tests.support.examples import EXAMPLES, Script

OURS = [
    *("MODEL", "BUDGET", "VIDEO_BUDGET", "METHOD", "LISTEN", "PORT", "VLLM", "ANCHORPRUNE"),
    *("VENV", "ARGS"),  # of `make serve`
]
SCRIPT = Script("serve.sh", OURS)


def served(*args: str, **variables: str) -> Any:
    """The last command, as `vllm serve` reads it."""
    anchorprune_vllm.register()
    *_, (vllm, serve, *flags) = SCRIPT.dry_run(*args, **variables)
    assert (vllm, serve) == ("vllm", "serve")
    return make_arg_parser(FlexibleArgumentParser()).parse_args(flags)


def test_help() -> None:
    ended = SCRIPT.run("--help")
    assert ended.returncode == 0
    assert all(f"  {name}" in ended.stdout or f", {name}" in ended.stdout for name in OURS[:-2])


def test_refusals(subtests: pytest.Subtests) -> None:
    for args, variables, words in (
        (["--budget", "64"], {}, "serve.sh: unknown argument '--budget'; flags of vllm serve go"),
        ([], {"PORT": "http"}, "PORT is 'http': give a positive whole number"),
        ([], {"VLLM": "/nowhere"}, "there is no '/nowhere': name it, VLLM=/path/to/bin/vllm"),
        ([], {"VLLM": "true", "ANCHORPRUNE": "/nowhere"}, "there is no '/nowhere': name it, ANCHO"),
    ):
        with subtests.test(args=args, variables=variables):
            ended = SCRIPT.run(*args, **variables)
            assert ended.returncode == 2
            assert words in ended.stderr
            assert ended.stdout == ""


def test_without_settings_it_serves_the_small_model() -> None:
    make, _ = SCRIPT.dry_run()
    assert make == ["anchorprune", "demo-model", ".demo/trained-llava-1.5"]
    args = served()
    assert args.model_tag == ".demo/trained-llava-1.5"
    assert args.hf_overrides["anchorprune"] == {
        "budget": "16",
        "method": "anchorprune",
        "text_encoder": ".demo/trained-llava-1.5/clip",
        "similarity": "raw",
    }
    assert (args.host, args.port, args.served_model_name) == ("127.0.0.1", 8000, ["demo"])
    assert args.trust_request_mm_kwargs  # as openai_client.py needs it
    assert args.enable_prompt_tokens_details


def test_a_model_of_the_users() -> None:
    variables = {"MODEL": "org/model", "VIDEO_BUDGET": "5%", "METHOD": "divprune", "PORT": "1234"}
    assert len(SCRIPT.dry_run(**variables)) == 1
    args = served("--", "--max-model-len", "4096", **variables)
    assert (args.model_tag, args.port, args.max_model_len) == ("org/model", 1234, 4096)
    assert args.hf_overrides["anchorprune"] == {
        "budget": "64",
        "video_budget": "5%",
        "method": "divprune",
    }
    assert not args.trust_request_mm_kwargs
    assert not args.enforce_eager


def test_where_it_listens() -> None:
    """HOST is the machine's name in some shells, and a compiler's target in conda."""
    assert served(LISTEN="0.0.0.0", HOST="x86_64-conda-linux-gnu").host == "0.0.0.0"
    assert served(HOST="x86_64-conda-linux-gnu").host == "127.0.0.1"


def test_make_serve_is_the_script(tmp_path: Path) -> None:
    """With its variables, and ARGS as flags of vLLM's."""
    for name in ("vllm", "anchorprune"):
        stand_in = tmp_path / "bin" / name
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text("#!/usr/bin/env bash\n")
        stand_in.chmod(0o755)
    ended = subprocess.run(
        [
            *("make", "--no-print-directory", "--assume-old=setup", "serve", f"VENV={tmp_path}"),
            *("MODEL=org/model", "BUDGET=7", "PORT=1234", "ARGS=--seed 3"),
        ],
        cwd=EXAMPLES.parent,
        env=SCRIPT.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    command = shlex.split(ended.stdout.splitlines()[-1])
    variables = {"MODEL": "org/model", "BUDGET": "7", "PORT": "1234"}
    (expected,) = SCRIPT.dry_run("--", "--seed", "3", VLLM=f"{tmp_path}/bin/vllm", **variables)
    assert command == expected

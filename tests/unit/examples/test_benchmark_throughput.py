# SPDX-License-Identifier: Apache-2.0
"""examples/benchmark_throughput.sh: what it would run, and what it makes of the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from anchorprune_vllm.commands.bench.served import checkpoint
from anchorprune_vllm.commands.bench.shapes import MODEL_SHAPES
from anchorprune_vllm.commands.chosen_methods import ChosenMethod
from anchorprune_vllm.commands.main import _parser
from tests.support.examples import Script

OURS = ["RUNS", "CONCURRENT", "REQUESTS", "OUTPUT", "REPEAT", "OUT", "ANCHORPRUNE"]
SCRIPT = Script("benchmark_throughput.sh", OURS)
BUDGETS = {
    "llava-1.5": ["128", "64", "32"],
    "llava-next": ["640", "320", "160"],
    "qwen2.5-vl": ["256", "128", "64"],
    "llava-video": ["1024", "512"],
    "qwen2.5-vl-video": ["20%", "10%"],
}


def test_help() -> None:
    ended = SCRIPT.run("--help")
    assert ended.returncode == 0
    assert all(f"  {name}" in ended.stdout for name in OURS)


def test_refusals(subtests: pytest.Subtests) -> None:
    for args, variables, words in (
        (["--model", "m"], {}, "unknown argument '--model'; those of anchorprune bench serve go"),
        ([], {"REQUESTS": "few"}, "REQUESTS is 'few': give a positive whole number"),
        ([], {"CONCURRENT": "1,0"}, "CONCURRENT is '1,0': give positive whole numbers, as 1,8,32"),
        ([], {"RUNS": "llava-1.5 gpt"}, "RUNS has 'gpt': the runs are llava-1.5, llava-next"),
        ([], {"ANCHORPRUNE": "/nowhere"}, "there is no '/nowhere': name it"),
    ):
        with subtests.test(args=args, variables=variables):
            ended = SCRIPT.run(*args, **variables)
            assert ended.returncode == 2
            assert words in ended.stderr
            assert ended.stdout == ""


def test_it_runs_the_papers_budgets() -> None:
    commands = SCRIPT.dry_run("--", "--methods", "divprune")
    assert [Path(command[-3]).name for command in commands] == list(BUDGETS)
    for command, (name, budgets) in zip(commands, BUDGETS.items(), strict=True):
        args = _parser().parse_args(command[1:])  # as the command itself reads them
        assert (args.budgets, args.concurrency, args.requests) == (budgets, [1, 8, 32], 50)
        assert (args.out, args.methods) == (
            Path("bench-throughput") / name,
            [ChosenMethod("divprune")],
        )
        assert args.vllm_video_pruning == (name == "qwen2.5-vl-video")
        if name in MODEL_SHAPES:
            assert (args.media.frames > 1) == (MODEL_SHAPES[name].media.frames > 1)
        # And as it is served.
        model = checkpoint(args.model, args.media, None, args.server_args)
        pooled = ["--hf-overrides", '{"mm_spatial_pool_mode": "average"}']
        assert list(model.flags) == (pooled if name == "llava-video" else [])


STAND_IN = """#!/usr/bin/env bash
while [ "$1" != --out ]; do shift; done
case $2 in *qwen*) exit 1 ;; esac
mkdir -p "$2"
printf '# %s\\n\\n## 1 at once\\nwide\\n\\n## As in the paper\\n\\nnarrow\\n' "$(basename "$2")" \\
    >"$2/table.md"
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    path = tmp_path / "anchorprune"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


def test_the_tables_are_put_together_and_failures_told(stand_in: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs = "llava-1.5 qwen2.5-vl llava-next"
    ended = SCRIPT.run(ANCHORPRUNE=stand_in, OUT=str(out), RUNS=runs)
    assert ended.returncode == 1
    assert "failed: qwen2.5-vl; the same command tries again" in ended.stderr
    assert (out / "table.md").read_text().split() == [
        *("#", "llava-1.5", "##", "As", "in", "the", "paper", "narrow"),
        *("#", "llava-next", "##", "As", "in", "the", "paper", "narrow"),
    ]


def test_failures_are_told_if_nothing_else_is(stand_in: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    ended = SCRIPT.run(ANCHORPRUNE=stand_in, OUT=str(out), RUNS="qwen2.5-vl qwen2.5-vl-video")
    assert ended.returncode == 1
    assert "failed: qwen2.5-vl qwen2.5-vl-video; the same command" in ended.stderr


def test_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    assert SCRIPT.run("--dry-run", OUT=str(tmp_path / "out")).returncode == 0
    assert not (tmp_path / "out").exists()

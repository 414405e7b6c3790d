# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from anchorprune_vllm.tools.cli import main
from anchorprune_vllm.tools.demo_model import ARCHITECTURES

SERVE = ["bench", "serve", "--shape", "llava-1.5"]
QUESTIONS = ["bench", "questions", "--shape", "llava-1.5"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_demo_model(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo-model", str(tmp_path / "model"), "--arch", arch]) == 0
    assert "144 visual tokens per" in capsys.readouterr().out
    assert json.loads((tmp_path / "model" / "demo_model.json").read_text())["arch"] == arch


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").touch()
    assert main(["demo-model", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("anchorprune: error: ")
    assert "is not a demo model" in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["demo", "--images", "0"], "'0' is not a whole number of at least 1"),
        (["demo", "--budgets", "16,x"], "Budget 'x' is not allowed"),
        (["demo-model", "d", "--arch", "x"], f"--arch {{trained,{','.join(ARCHITECTURES)}}}]"),
        (["bench"], "the following arguments are required: KIND"),
        (["bench", "parts", "--repeats", "-1"], "is not a whole number of at least 1"),
        (["bench", "serve"], "one of the arguments --shape --model is required"),
        (["bench", "serve", "--shape", "gpt"], "--shape: invalid choice: 'gpt' (choose from"),
        (["bench", "serve", "--shape", "llava-1.5", "--model", "m"], "not allowed with argument"),
        ([*SERVE, "--scale", "0"], "--scale: '0' is not a number from 0.001 to 100"),
        ([*SERVE, "--scale", "nan"], "--scale: 'nan' is not a number from 0.001 to 100"),
        ([*SERVE, "--media", "336"], "--media: '336' is not WIDTHxHEIGHT"),
        ([*SERVE, "--media", "0x336"], "--media: '0x336' is not WIDTHxHEIGHT"),
        ([*SERVE, "--method", "best"], "--method: invalid choice: 'best'"),
        ([*SERVE, "--method", "first"], "--method: invalid choice: 'first'"),
        ([*SERVE, "--budgets", "0"], "--budgets: Budget '0' is not allowed"),
        ([*SERVE, "--concurrency", "1,x"], "--concurrency: 'x' is not a whole number"),
        ([*QUESTIONS, "--questions", "1"], "--questions: give at least 2 questions"),
        ([*QUESTIONS, "--budget", "8,16"], "--budget: '8,16' is more than one budget"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_arguments(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(args)
    assert words in capsys.readouterr().err

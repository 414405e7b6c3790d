# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from anchorprune_vllm.commands.main import main
from anchorprune_vllm.testing.demo_models import make
from anchorprune_vllm.testing.demo_models.make import DEMO_MODELS, TRAINED
from anchorprune_vllm.testing.demo_models.random_weights import TINY

SERVE = ["bench", "serve", "--shape", "llava-1.5"]
QUESTIONS = ["bench", "questions", "--shape", "llava-1.5"]


def record_of(model: Path) -> dict[str, Any]:
    return json.loads((model / "demo_model.json").read_text())


@pytest.mark.parametrize("arch", DEMO_MODELS)
def test_demo_model_with_random_weights(
    arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A seed asks for them where there are trained ones; elsewhere it is 0 by itself."""
    seed = [] if arch not in TRAINED else ["--seed", "3"]
    assert main(["demo-model", str(tmp_path / "model"), "--arch", arch, *seed]) == 0
    assert "144 visual tokens per" in capsys.readouterr().out
    record = record_of(tmp_path / "model")
    assert (record["arch"], record["seed"]) == (arch, 3 if seed else 0)


@pytest.mark.parametrize("arch", TRAINED)
def test_demo_model_is_trained_unless_there_is_a_seed(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    DEMO_MODELS[arch](tmp_path / "package" / arch, 5, 28, TINY)
    monkeypatch.setattr(make, "_TRAINED_FILES", tmp_path / "package")
    assert main(["demo-model", str(tmp_path / "model"), "--arch", arch]) == 0
    assert "4 visual tokens per" in capsys.readouterr().out
    assert record_of(tmp_path / "model")["arch"] == arch
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "package" / arch / "model.safetensors").read_bytes()
    # A trained model and one with random weights do not pass for each other.
    assert main(["demo-model", str(tmp_path / "model"), "--arch", arch, "--seed", "0"]) == 1
    assert "remove it, or choose another directory" in capsys.readouterr().err


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").touch()
    assert main(["demo-model", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("anchorprune: error: ")
    assert "is not a demo model" in line


def test_the_systems_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["demo-model", str(tmp_path / "file" / "model")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("anchorprune: error: ")
    assert str(tmp_path / "file") in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_a_command(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*args: Any, **options: Any) -> None:
        signal.raise_signal(number)
        raise AssertionError("not reached")

    monkeypatch.setattr("anchorprune_vllm.testing.demo_models.make.make_trained_model", stopped)
    # As a shell starts background jobs.
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert main(["demo-model", "nowhere"]) == 130
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err == "anchorprune: stopped\n"


@pytest.mark.parametrize("kind", ["serve", "questions", "profile"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "./none"], "there is no model directory './none'"),
        (["--model", "a/b", "--text-encoder", "none"], "there is no text encoder directory 'none'"),
        (["--model", "a/b", "--out", "/proc/new"], "--out is /proc/new, and /proc cannot be wri"),
        (["--model", "a/b", "--scale", "2"], "--scale is for --shape"),
    ],
)
def test_benchmarks_that_cannot_start(
    kind: str, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", kind, *args]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("anchorprune: error: ")
    assert words in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["demo", "--images", "0"], "'0' is not a whole number of at least 1"),
        (["demo", "--budgets", "16,x"], "Budget 'x' is not allowed"),
        (
            ["demo-model", "d", "--arch", "x"],
            "invalid choice: 'x' (choose from 'llava-1.5', ",
        ),
        (["demo", "--arch", "x"], f"--arch {{{','.join(DEMO_MODELS)}}}]"),
        (["bench"], "the following arguments are required: KIND"),
        (["bench", "parts", "--repeats", "-1"], "is not a whole number of at least 1"),
        (["bench", "serve"], "one of the arguments --shape --model is required"),
        (["bench", "serve", "--shape", "gpt"], "--shape: invalid choice: 'gpt' (choose from"),
        (["bench", "serve", "--shape", "llava-1.5", "--model", "m"], "not allowed with argument"),
        ([*SERVE, "--scale", "0"], "--scale: '0' is not a number from 0.001 to 100"),
        ([*SERVE, "--scale", "nan"], "--scale: 'nan' is not a number from 0.001 to 100"),
        ([*SERVE, "--media", "336"], "--media: '336' is not WIDTHxHEIGHT"),
        ([*SERVE, "--media", "0x336"], "--media: '0x336' is not WIDTHxHEIGHT"),
        ([*SERVE, "--server-args", "a 'b"], '--server-args: "a \'b" cannot be split into words'),
        ([*SERVE, "--concurrency", "1,x"], "--concurrency: 'x' is not a whole number"),
        ([*QUESTIONS, "--questions", "1"], "--questions: give at least 2 questions"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_arguments(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(args)
    assert words in capsys.readouterr().err

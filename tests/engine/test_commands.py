# SPDX-License-Identifier: Apache-2.0
"""The commands a user types."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from anchorprune_vllm.commands.bench import serve
from anchorprune_vllm.commands.bench.contenders import Contender
from anchorprune_vllm.commands.main import main
from anchorprune_vllm.testing.demo_models.make import TRAINED

TIMEOUT = 240


def demo(directory: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "anchorprune_vllm.commands.main",
            "demo",
            "--directory",
            directory,
            *args,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("arch", TRAINED)
def test_demo(arch: str, tmp_path: Path) -> None:
    process = demo(tmp_path, "--arch", arch, "--budgets", "100%,16,2", "--images", "1")
    output = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == 0, output
    rows = [line.split("│")[1:5] for line in output.splitlines() if "│" in line]
    table = {name.strip(): columns for name, *columns in rows if columns[0].strip()}
    tokens = {budget: int(columns[0]) for budget, columns in table.items()}
    text = tokens["16 (server)"] - 16
    assert tokens == {"100% (unpruned)": text + 256, "16 (server)": text + 16, "2": text + 2}
    right = {budget: int(columns[2]) for budget, columns in table.items()}
    # Of 40; a fifth could be guessed.
    assert right["100% (unpruned)"] >= 36
    assert right["100% (unpruned)"] >= right["16 (server)"] >= 26
    kept = [line for line in output.splitlines() if re.fullmatch("(██|▒▒|··){16}", line)]
    assert len(kept) == 16
    assert sum(line.count("██") + line.count("▒▒") for line in kept) == 16
    assert (tmp_path / "example.html").is_file()


def is_alive(process: psutil.Process) -> bool:
    try:
        # One that has ended stays listed until its parent has asked for its exit code.
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_interrupted_demo_leaves_nothing_running(tmp_path: Path) -> None:
    signals = (signal.SIGINT, signal.SIGTERM)
    demos = [demo(tmp_path / str(number)) for number in signals]
    started: dict[int, set[psutil.Process]] = {process.pid: set() for process in demos}
    deadline = time.monotonic() + TIMEOUT
    # The engine's own processes, and the one that draws an example, are there once the server has
    # begun to load the model.
    while min(map(len, started.values())) < 4 and time.monotonic() < deadline:
        for pid, children in started.items():
            children.update(psutil.Process(pid).children(recursive=True))
        time.sleep(0.2)
    assert min(map(len, started.values())) >= 4
    for process, number in zip(demos, signals, strict=True):
        process.send_signal(number)
    for process in demos:
        output = process.communicate(timeout=TIMEOUT)[0]
        assert process.returncode == 130, output
        assert "anchorprune: stopped" in output
    assert [child for children in started.values() for child in children if is_alive(child)] == []


def test_a_wrong_start_ends_in_one_line(demo_model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(demo_model)]
    flags = ["--anchorprune-budget", "16", "--anchorprune-text-encoder", str(missing)]
    ended = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stdout + ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(f"vllm: error: anchorprune: cannot read the text encoder '{missing}'")


def test_bench_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the servers that it compares, of a very small shape, under the smallest load."""
    ours = Contender("anchorprune", "11.1%")
    monkeypatch.setattr(serve, "contenders", lambda *args, **options: [ours])
    command = [
        *("bench", "serve", "--shape", "llava-1.5", "--scale", "0.004", "--budgets", "11.1%"),
        *("--concurrency", "2", "--requests", "4", "--output-tokens", "2"),
        *("--out", str(tmp_path / "out"), "--models", str(tmp_path / "models")),
    ]
    assert main(command) == 0
    assert "2 at once: first token" in capsys.readouterr().out
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    (one,) = stored["measurements"]
    assert one["contender"] == {"method": "anchorprune", "budget": "11.1%"}
    assert one["client"]["completed"] == 4
    assert 4 * 64 < one["client"]["total_input_tokens"] < 4 * 144
    assert one["embedding_seconds"] > one["selection_seconds"] > 0
    assert one["kv_tokens"] > 10_000
    assert one["memory_bytes"] > 2**29
    assert "| anchorprune | 11.1% |" in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "budget.png").exists()


def test_bench_profile(tmp_path: Path) -> None:
    """Three engines of a very small shape."""
    command = [
        *(sys.executable, "-m", "anchorprune_vllm.commands.main", "bench", "profile"),
        *("--shape", "llava-1.5", "--scale", "0.004", "--requests", "2"),
        *("--out", str(tmp_path / "out"), "--models", str(tmp_path / "models")),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "one request up to its first token" in ended.stdout
    unpruned, free, ours = json.loads((tmp_path / "out" / "profile.json").read_text())["profiles"]
    assert unpruned["prompt_tokens"] - ours["prompt_tokens"] == 576 - 64
    spent = {one["name"]: one["milliseconds"] for one in (unpruned, free, ours)}
    ours_alone = {"selection", "question's text encoder, relevance"}
    for name, stages in spent.items():
        assert {stage for stage, time in stages.items() if time == 0} == (
            ours_alone if name == "unpruned" else set()
        )
        assert stages.pop("all") == pytest.approx(sum(stages.values()), rel=0.2)

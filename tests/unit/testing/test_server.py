# SPDX-License-Identifier: Apache-2.0
"""A server that does not get ready is stopped, whatever ended the wait: with a stand-in for it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from anchorprune_vllm.testing.server import VllmServer

SLEEPS = "import time; print('here', flush=True); time.sleep(600)"


def stand_in(tmp_path: Path, code: str, start_seconds: float = 1) -> VllmServer:
    server = VllmServer("m", [], tmp_path / "logs" / "server.log", start_seconds)
    server._command = [sys.executable, "-c", code]
    return server


def test_one_that_is_too_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def now() -> float:
        """The time is up as soon as it has said something."""
        return float(10 * server.log.stat().st_size)

    monkeypatch.setattr(
        "anchorprune_vllm.testing.server.time", SimpleNamespace(monotonic=now, sleep=time.sleep)
    )
    server = stand_in(tmp_path, SLEEPS)
    with pytest.raises(RuntimeError, match=r"was not ready after 1 s; the end of .*log:\nhere"):
        server.__enter__()
    assert server._process.returncode is not None


def test_one_that_ends(tmp_path: Path) -> None:
    server = stand_in(tmp_path, "raise SystemExit('wrong flag')", start_seconds=60)
    with pytest.raises(RuntimeError, match=r"ended with code 1; the end of .*log:\nwrong flag"):
        server.__enter__()


def test_interrupted_while_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> NoReturn:
        raise KeyboardInterrupt

    server = stand_in(tmp_path, SLEEPS)
    monkeypatch.setattr(server, "_wait_until_healthy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.__enter__()
    assert server._process.returncode is not None


def test_one_that_is_ready_runs_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = stand_in(tmp_path, SLEEPS)
    monkeypatch.setattr(server, "_wait_until_healthy", lambda: None)
    with server:
        assert server._process.poll() is None
    assert server._process.returncode is not None

# SPDX-License-Identifier: Apache-2.0
"""A test that hangs, or whose process is lost, ends the run red, with its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

KILLED = """
import os, signal

def test_before(): pass
def test_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(): pass
"""
HANGS = """
import threading

def test_hangs(): threading.Event().wait()
def test_after(): pass
"""
# It waits for itself and holds the interpreter's lock: no Python runs there any more, and so no
# handler of a signal does.
HANGS_OUTSIDE_PYTHON = """
import ctypes

def test_hangs():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""


def run_pytest(tmp_path: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """With the settings of this repository, in processes as `make test` has them."""
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    env = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    settings = ("-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", *options)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", *settings, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    ended = run_pytest(tmp_path, KILLED)
    assert ended.returncode == 1
    assert "crashed while running" in ended.stdout
    assert "FAILED" in ended.stdout
    assert "test_it.py::test_killed" in ended.stdout


def test_a_test_that_hangs(tmp_path: Path) -> None:
    ended = run_pytest(tmp_path, HANGS, "-o", "timeout=2")
    assert ended.returncode == 1
    assert "test_it.py::test_hangs" in ended.stdout
    assert "Failed: Timeout (>2.0s) from pytest-timeout" in ended.stdout
    assert "def test_hangs(): threading.Event().wait()" in ended.stdout  # the stack
    assert "1 failed, 2 passed" in ended.stdout


def test_a_test_that_hangs_where_no_signal_is_handled(tmp_path: Path) -> None:
    ended = run_pytest(
        tmp_path, HANGS_OUTSIDE_PYTHON, "-o", "timeout=2", "-o", "faulthandler_timeout=4"
    )
    assert ended.returncode == 1
    assert "test_it.py::test_hangs" in ended.stdout
    assert "Timeout (0:00:04)!" in ended.stderr
    assert "in test_hangs" in ended.stderr  # the stack


def test_all_tests_have_a_limit(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) < pytestconfig.getini("faulthandler_timeout")

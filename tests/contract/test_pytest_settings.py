# SPDX-License-Identifier: Apache-2.0
"""A test that hangs, or whose process is lost, ends the run red, with its name."""

from __future__ import annotations

import os
import signal
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
WITH_A_CHILD = """
import os, pathlib, signal, time

def test_killed():
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    pathlib.Path(__file__).with_name("child").write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)
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


def run_pytest(tmp_path: Path, source: str, *options: str) -> tuple[int, str]:
    """Exit code and output, with the settings of this repository and processes as `make test`."""
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    hook = "from tests.support.lost_workers import pytest_configure"  # as in tests/conftest.py
    (tmp_path / "conftest.py").write_text(hook)
    env = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    settings = ("-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", *options)
    log = tmp_path / "log"  # no pipe: a child that lives on would keep it open
    with log.open("w") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-n2", "--dist=loadfile", *settings, str(tmp_path)],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=240,
            check=False,
        )
    return ended.returncode, log.read_text()


@pytest.mark.parametrize("source", [KILLED, WITH_A_CHILD], ids=["alone", "with a child"])
def test_a_process_that_is_killed(tmp_path: Path, source: str) -> None:
    try:
        code, output = run_pytest(tmp_path, source)
    finally:
        if source == WITH_A_CHILD:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert code == 1
    assert "crashed while running" in output
    assert "FAILED" in output
    assert "test_it.py::test_killed" in output


def test_a_test_that_hangs(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, HANGS, "-o", "timeout=2")
    assert code == 1
    assert "test_it.py::test_hangs" in output
    assert "Failed: Timeout (>2.0s) from pytest-timeout" in output
    assert "def test_hangs(): threading.Event().wait()" in output  # the stack
    assert "1 failed, 2 passed" in output


def test_a_test_that_hangs_where_no_signal_is_handled(tmp_path: Path) -> None:
    limits = ("-o", "timeout=2", "-o", "faulthandler_timeout=4")
    code, output = run_pytest(tmp_path, HANGS_OUTSIDE_PYTHON, *limits)
    assert code == 1
    assert "test_it.py::test_hangs" in output
    assert "Timeout (0:00:04)!" in output
    assert "in test_hangs" in output  # the stack


def test_all_tests_have_a_limit(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) < pytestconfig.getini("faulthandler_timeout")

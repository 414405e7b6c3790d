# SPDX-License-Identifier: Apache-2.0
"""Start `vllm serve`, wait until it is ready, and stop it with all its processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

_STOP_SECONDS = 8
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class VllmServer:
    """A context manager that runs `vllm serve MODEL ARGS...` on a free loopback port.

    The server gets the variables of `env` beside those of this process.
    """

    def __init__(
        self,
        model: Path | str,
        args: Sequence[str],
        log: Path,
        start_seconds: float = 300,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._start_seconds = start_seconds
        self._env = {**os.environ, **(env or {})}
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), *args),
        ]

    def __enter__(self) -> VllmServer:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log, ExitStack() as undo:
            # In a session of its own it does not see Ctrl-C: `stop` ends the whole group.
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
            undo.callback(self.stop)
            self._wait_until_healthy()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Return the id of the process that has started all others."""
        return self._process.pid

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._start_seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._error(f"ended with code {self._process.returncode}")
            try:
                with NO_PROXY.open(f"{self.url}/health", timeout=1):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise self._error(f"was not ready after {self._start_seconds:.0f} s")

    def _error(self, what: str) -> RuntimeError:
        return RuntimeError(f"vllm serve {what}; the end of {self.log}:\n{tail(self.log)}")

    def stop(self) -> None:
        """Interrupt the server, then end its whole process group."""
        group = self._process.pid
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_SECONDS)
        finally:  # also if Ctrl-C comes again while waiting
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tail(path: Path, lines: int = 30) -> str:
    """Return the last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

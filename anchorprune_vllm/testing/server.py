# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` of our own: started, waited for, and stopped with all its processes."""

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
from types import TracebackType

_STOP_SECONDS = 8
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class VllmServer:
    """Context manager around `vllm serve MODEL ARGS...` on a free loopback port."""

    def __init__(
        self,
        model: Path | str,
        args: Sequence[str],
        log: Path,
        start_seconds: float = 300,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """env: variables that the server gets beside ours."""
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
            # A session of its own: Ctrl-C reaches us alone, and we stop the whole group.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the process whose children are all others."""
        return self._process.pid

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._start_seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"vllm serve ended with code {self._process.returncode}; the end of "
                    f"{self.log}:\n{tail(self.log)}"
                )
            try:
                with NO_PROXY.open(f"{self.url}/health", timeout=1):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise RuntimeError(
            f"vllm serve was not ready after {self._start_seconds:.0f} s; the end of {self.log}:\n"
            f"{tail(self.log)}"
        )

    def stop(self) -> None:
        """Ask politely, then end the whole process group."""
        group = self._process.pid
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_SECONDS)
        finally:  # also when Ctrl-C comes again while waiting
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tail(path: Path, lines: int = 30) -> str:
    """The end of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

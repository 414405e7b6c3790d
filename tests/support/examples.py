# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/, which are no package: as modules, and as commands."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def load_example(name: str) -> ModuleType:
    """`name`: its path below examples/."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def run_example(
    name: str, *args: str, directory: Path | None = None, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """One that is written in Python, as a process; an engine would have two more of its own."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args],
        cwd=directory,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@dataclass(frozen=True)
class Script:
    """A shell script of examples/, whose settings are environment variables."""

    name: str
    variables: Sequence[str]
    """All that it reads: none of them comes from outside the test."""

    @property
    def path(self) -> Path:
        return EXAMPLES / self.name

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in self.variables}
        return kept | variables

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.path), *args],
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            check=False,
        )

    def dry_run(self, *args: str, **variables: str) -> list[list[str]]:
        """The commands that it would run."""
        ended = self.run("--dry-run", *args, **variables)
        assert ended.returncode == 0, ended.stderr
        return [shlex.split(line) for line in ended.stdout.splitlines()]

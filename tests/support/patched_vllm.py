# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM with diffs of `patches/` applied, beside the installed one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches"


class PatchedVllm:
    """A folder for the front of PYTHONPATH: real files where something changes, links elsewhere.

    Tests that diffs bring along are in it too, under `tests/`. `renamed`: old name -> new name, and
    the files in which it is replaced.
    """

    def __init__(
        self,
        folder: Path,
        diffs: Sequence[Path],
        renamed: Mapping[tuple[str, str], Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        (installed,) = find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
        self.changed = {path for diff in diffs for path in changed_files(diff)}
        self.changed |= {path for paths in renamed.values() for path in paths}
        _mirror(Path(installed), folder / "vllm", self.changed)
        for diff in diffs:
            git_apply(diff, folder)
        for (old, new), paths in renamed.items():
            for path in paths:
                file = folder / path
                text, count = re.subn(rf"\b{old}\b", new, file.read_text())
                assert count, f"{path} has no {old}"
                file.write_text(text)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`python ARGUMENTS` with this vLLM and this repository's package."""
        return subprocess.run(
            [sys.executable, *arguments],
            env={
                **os.environ,
                "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}",
                "PYTHONDONTWRITEBYTECODE": "1",  # links lead to the installed files
                **environment,
            },
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
        )


def changed_files(diff: Path) -> list[str]:
    """Paths in vLLM's repository."""
    return re.findall(r"^\+\+\+ b/(.+)$", diff.read_text(), re.MULTILINE)


def git_apply(diff: Path, folder: Path, *options: str) -> None:
    """As `git apply` does it: every line of context must be there; raises RuntimeError if not."""
    done = subprocess.run(
        ["git", "apply", "--whitespace=error-all", *options, str(diff)],
        cwd=folder,
        # A repository around the folder would make git look for the files at its top.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{diff.name} does not apply: {done.stderr}")


def _mirror(source: Path, target: Path, changed: Iterable[str], prefix: str = "vllm/") -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        path = prefix + entry.name
        if path in changed:
            shutil.copyfile(entry, target / entry.name)
        elif any(other.startswith(f"{path}/") for other in changed):
            _mirror(entry, target / entry.name, changed, f"{path}/")
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)

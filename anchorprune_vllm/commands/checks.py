# SPDX-License-Identifier: Apache-2.0
"""Whether a command can do what it is asked, found out before anything is started or written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def check_model(model: str, what: str = "model") -> None:
    """Raise ValueError for what is neither a local model nor the name of one on the hub."""
    directory = Path(model)
    if not directory.is_dir():
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise ValueError(
                f"there is no {what} directory {model!r}; the name of a {what} on the hub has the "
                "form owner/name"
            )
    elif not (directory / "config.json").is_file():
        raise ValueError(f"{directory} is no {what}: there is no config.json in it")


def check_out(out: Path) -> None:
    """Raise ValueError if a directory for results cannot be made or written; nothing is made."""
    there = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ValueError(f"--out is {out}, and {there} is no directory: choose another")
    if not is_writable(there):
        raise ValueError(f"--out is {out}, and {there} cannot be written: choose another")


def is_writable(directory: Path) -> bool:
    """Whether a file can be made there. It is tried: permissions do not tell all."""
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True

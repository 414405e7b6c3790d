# SPDX-License-Identifier: Apache-2.0
"""Results on disk: written whole or not at all, and continued only under the same settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

_Row = TypeVar("_Row")


class ResumableResults(Generic[_Row]):
    """What a command has measured so far, in a JSON file that the next command continues.

    Args:
        path: the file; it is read if it exists, and written whenever a row is added.
        settings: what the rows were measured with. A file with other settings is refused.
        row_type: a dataclass, a row of the file.
        key: the name of the list of rows in the file.
        titles: what to call settings in messages whose values say nothing to people, like hashes.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        row_type: type[_Row],
        key: str,
        titles: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.settings = dict(settings)
        self.commands: list[str] = []
        self.rows: list[_Row] = []
        self._key = key
        self._adapter = TypeAdapter(list[row_type])  # type: ignore[valid-type]
        if path.exists():
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
                found, rows = stored["settings"], self._adapter.validate_python(stored[key])
                commands = stored["commands"]
            except (OSError, KeyError, TypeError, ValueError) as error:
                raise unreadable(path, error) from error
            check_settings(path, found, self.settings, titles)
            self.rows, self.commands = rows, commands

    def add(self, *rows: _Row) -> None:
        """Keep rows, and write the file."""
        self.rows += rows
        self.write()

    def write(self) -> None:
        """Write the file."""
        write_json(self.path, self.content(), ensure_ascii=False)

    def content(self) -> dict[str, Any]:
        """Return what the file holds."""
        rows = self._adapter.dump_python(self.rows, mode="json")
        return {"settings": self.settings, "commands": self.commands, self._key: rows}


def write_json(path: Path, content: Mapping[str, Any], **options: Any) -> None:
    """Write a file with the options of `json.dumps`; if interrupted, leave it as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".json.new")
    scratch.write_text(json.dumps(content, **options) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def unreadable(path: Path, error: Exception) -> ValueError:
    """Return the error for a file that exists but was not written by this command."""
    return ValueError(
        f"cannot read the results in {path} ({error!r:.200}): remove the file, or choose another "
        "--out"
    )


def check_settings(
    path: Path,
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    titles: Mapping[str, str] | None = None,
) -> None:
    """Raise ValueError if the results in a file were measured with other settings."""
    titles = titles or {}
    wanted = json.loads(json.dumps(wanted))  # as it will be read back: JSON has no tuples
    different = [
        f"other {titles[name]}"
        if name in titles
        else f"{name} {found.get(name)!r}, now {wanted.get(name)!r}"
        for name in dict.fromkeys([*found, *wanted])
        if found.get(name) != wanted.get(name)
    ]
    if different:
        raise ValueError(
            f"the results in {path} are of other settings ({'; '.join(different)}): give the same "
            "ones to go on, choose another --out, or remove the file"
        )

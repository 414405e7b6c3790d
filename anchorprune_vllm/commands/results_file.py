# SPDX-License-Identifier: Apache-2.0
"""Results on disk: written whole or not at all, and continued only under the same settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel


class ResumableResults(BaseModel):
    """What a command has measured so far, in a JSON file that the next command continues."""

    titles: ClassVar[Mapping[str, str]] = {}
    """What to call settings in messages whose values say nothing to people, such as hashes."""

    settings: dict[str, Any]
    commands: list[str]

    def continued(self, path: Path) -> Self:
        """Return the results in a file, or these if there is none yet.

        Raises ValueError if the file cannot be read, or if its settings are others.
        """
        if not path.exists():
            return self
        try:
            found = self.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
        check_settings(path, found.settings, self.settings, self.titles)
        return found

    def save(self, path: Path, **others: Any) -> None:
        """Write the file, with other values that are not read again."""
        write_json(path, self.model_dump(mode="json") | others, ensure_ascii=False)


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

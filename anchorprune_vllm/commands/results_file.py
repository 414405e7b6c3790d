# SPDX-License-Identifier: Apache-2.0
"""Results on disk: written whole or not at all, and gone on with under the same settings alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any], **options: Any) -> None:
    """Write a file; whoever is interrupted meanwhile leaves it as it was.

    `options` are those of `json.dumps`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".json.new")
    scratch.write_text(json.dumps(content, **options) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def unreadable(path: Path, error: Exception) -> ValueError:
    """For a file that is there and is none of ours."""
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
    """Raise ValueError if the results in a file are of other settings.

    `titles`: of settings whose value says nothing to people, what they stand for.
    """
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

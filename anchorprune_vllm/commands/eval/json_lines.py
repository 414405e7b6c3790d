# SPDX-License-Identifier: Apache-2.0
"""Files of the user's with a JSON object on each line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class JsonLine(NamedTuple):
    """One line that is not empty."""

    number: int
    """In the file, from 1."""
    text: str
    row: dict[str, Any]


def read_json_lines(path: Path, example: str) -> list[JsonLine]:
    """All lines that are not empty.

    Raises ValueError, which says where the file is wrong, and shows `example` of a line.
    """
    try:
        # Not splitlines(): it also splits at characters that JSON allows inside a string.
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}; give lines such as {example}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    found = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}): {text!r:.80}; give lines such as "
                f"{example}"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, line {number} is not a JSON object: {text!r:.80}; give lines such as "
                f"{example}"
            )
        found.append(JsonLine(number, text, row))
    if not found:
        raise ValueError(f"{path} is empty: give lines such as {example}")
    return found

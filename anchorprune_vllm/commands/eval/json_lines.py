# SPDX-License-Identifier: Apache-2.0
"""Files that hold a JSON object on each line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class JsonLine(NamedTuple):
    """A line that is not empty."""

    number: int
    """Its number in the file, from 1."""
    text: str
    row: dict[str, Any]


def read_json_lines(path: Path, example: str) -> list[JsonLine]:
    """Read all lines that are not empty.

    Raises ValueError if the file or a line cannot be read; the message shows `example` as a line.
    """
    advice = f"give lines such as {example}"
    try:
        # Not splitlines(): it also splits at characters that JSON allows inside a string.
        texts = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}; {advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    lines = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({error}): {text!r:.80}; {advice}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} is not a JSON object: {text!r:.80}; {advice}")
        lines.append(JsonLine(number, text, row))
    if not lines:
        raise ValueError(f"{path} is empty: {advice}")
    return lines

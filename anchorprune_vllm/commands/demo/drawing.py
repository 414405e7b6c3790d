# SPDX-License-Identifier: Apache-2.0
"""Draw which tokens of the demo's example are kept, while its server runs."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands.chosen_methods import Method
from anchorprune_vllm.commands.demo.questions import DemoQuestion

_SIGNS = {"anchor": "██", "context": "▒▒", "dropped": "··"}


class Drawing:
    """`anchorprune explain` in a process of its own, which ends with the block at the latest."""

    def __init__(
        self, directory: Path, model: Path, asked: DemoQuestion, method: Method, budget: str
    ) -> None:
        self._directory = directory
        self._model = model
        self._asked = asked
        self._method = method
        self._budget = budget

    def __enter__(self) -> Drawing:
        self._directory.mkdir(parents=True, exist_ok=True)
        image = self._path("png")
        image.write_bytes(base64.b64decode(self._asked.media.url.partition(",")[2]))
        command = ["explain", str(self._model), str(image), self._asked.text]
        command += ["--methods", str(self._method), "--budgets", self._budget]
        command += ["--out", str(self._path("html")), "--json", str(self._path("json"))]
        with self._path("log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "anchorprune_vllm.commands.main", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def finish(self) -> str:
        """Return the kept tokens as lines of text, and the path of the page that shows them."""
        if self._process.wait() != 0:
            return f"The example could not be drawn: see {self._path('log')}"
        found = json.loads(self._path("json").read_text(encoding="utf-8"))
        return (
            f"Kept for {self._asked.text!r} at budget {self._budget}: {_SIGNS['anchor']} anchor, "
            f"{_SIGNS['context']} context, {_SIGNS['dropped']} dropped\n\n{as_text(found)}\n\n"
            f"The same on the image itself: {self._path('html')}"
        )

    def _path(self, suffix: str) -> Path:
        return self._directory / f"example.{suffix}"


def as_text(explanation: dict[str, Any]) -> str:
    """Draw the tokens of an image from the JSON of `anchorprune explain`, a line for each row."""
    (unit,), panel = explanation["view"]["units"], explanation["methods"][0]["panels"][0]
    states = ["dropped"] * len(unit["tokens"])
    for token, is_anchor in zip(panel["indices"], panel["is_anchor"], strict=True):
        states[token] = "anchor" if is_anchor else "context"
    rows: dict[float, str] = {}
    for (_, top, *_rest), state in zip(unit["tokens"], states, strict=True):
        rows[top] = rows.get(top, "") + _SIGNS[state]
    return "\n".join(rows.values())

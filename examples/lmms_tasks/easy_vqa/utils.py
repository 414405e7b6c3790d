# SPDX-License-Identifier: Apache-2.0
"""What easy_vqa.yaml asks of Python: picture, question, score. Runs inside lmms-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

_DATA = Path(__file__).parent / "data"
_METRICS = {"yes/no": "yes_no", "shape": "shape", "colour": "colour"}


def picture(row: dict[str, Any]) -> list[Image.Image]:
    with Image.open(_DATA / row["image"]) as image:
        return [image.convert("RGB")]


def question(row: dict[str, Any]) -> str:
    return str(row["question"])


def score(row: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """Exact match, but for case, white space and a full stop; once in all, once by kind."""
    (given,) = answers
    hit = float(given.strip().rstrip(".").lower() == row["answer"])
    return {"exact_match": hit, _METRICS[row["kind"]]: hit}

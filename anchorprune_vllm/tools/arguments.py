# SPDX-License-Identifier: Apache-2.0
"""Kinds of arguments that several subcommands take."""

from __future__ import annotations

import argparse
import json
from typing import Any

from anchorprune_vllm.budget import Budget


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def budgets(text: str) -> list[str]:
    """Budgets, separated by commas."""
    try:
        return [str(Budget.parse(part)) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value

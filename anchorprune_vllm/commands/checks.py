# SPDX-License-Identifier: Apache-2.0
"""Checks that a command makes before it starts an engine or writes a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anchorprune_vllm.commands.options import DTYPES, PREFIX
from anchorprune_vllm.config import CONFIG_KEY


def check_model(model: str, what: str = "model") -> None:
    """Raise ValueError unless this is a local model or could be the name of one on the hub."""
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
    """Raise ValueError if a directory for results cannot be made or written to; make nothing."""
    there = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ValueError(f"--out is {out}, and {there} is no directory: choose another")
    if not is_writable(there):
        raise ValueError(f"--out is {out}, and {there} cannot be written: choose another")


def is_writable(directory: Path) -> bool:
    """Return whether a file can be made in a directory, by making one: permissions can mislead."""
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def check_plot() -> None:
    """Raise RuntimeError if no plot can be drawn, which is better known before hours of work."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError("matplotlib is not installed; run: pip install '.[eval]'") from error


def check_engine_options(options: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Raise ValueError for arguments of the engine that vLLM does not know or would refuse.

    `also` holds names that are allowed beside those of `EngineArgs`.
    """
    from vllm.engine.arg_utils import EngineArgs

    if "model" in options:
        raise ValueError("--engine-args has a model: give it as the first argument instead")
    allowed = sorted({field.name for field in fields(EngineArgs)}.union(also) - {"model"})
    for name in options:
        if name not in allowed:
            near = get_close_matches(name, allowed)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(
                f"--engine-args has {name!r}, which vLLM does not know: {hint}The names are those "
                "of vllm.LLM"
            )
    dtype, overrides = options.get("dtype", "auto"), options.get("hf_overrides", {})
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: give one of {', '.join(DTYPES)}")
    if not isinstance(overrides, dict):
        raise ValueError(f"hf_overrides is {overrides!r}: give a JSON object")
    if CONFIG_KEY in overrides:
        raise ValueError(
            f"hf_overrides has {CONFIG_KEY!r}: {overrides[CONFIG_KEY]!r:.80}. Settings of pruning "
            "are this command's own flags, such as --methods, --budgets and --text-encoder: give "
            "these instead"
        )


def refusal(error: Exception) -> str:
    """Return the message of an error; of pydantic's, each wrong value and what is wrong with it."""
    if not isinstance(error, ValidationError):
        return str(error).removeprefix(PREFIX)
    found = []
    for each in error.errors(include_url=False):
        name = ".".join(map(str, each["loc"]))
        message = each["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if each["type"] == "missing":
            message = f"{name} is missing"
        elif name:  # without a name it is about several values, which the message itself tells
            message = f"{name} is {each['input']!r:.80}: {message}"
        found.append(message)
    return "; ".join(found)

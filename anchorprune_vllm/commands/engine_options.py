# SPDX-License-Identifier: Apache-2.0
"""What the user gives to vLLM's engine by name, and vLLM's refusals in few words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs

from anchorprune_vllm.commands.options import DTYPES, PREFIX
from anchorprune_vllm.config import CONFIG_KEY


def check_engine_options(options: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Raise ValueError for names that vLLM does not know, and for what cannot be a value.

    `also`: names that are known beside those of `EngineArgs`.
    """
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
    """The message of an error, without what pydantic writes around it."""
    if not isinstance(error, ValidationError):
        return str(error).removeprefix(PREFIX)
    found = []
    for each in error.errors(include_url=False):
        # Of a value, its name and itself; of all together, vLLM's own words say which are meant.
        where = f"{'.'.join(map(str, each['loc']))} is {each['input']!r:.80}: "
        message = each["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        found.append((where if each["loc"] else "") + message)
    return "; ".join(found)

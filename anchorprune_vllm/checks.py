# SPDX-License-Identifier: Apache-2.0
"""Checks of single settings; each error says what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any


def check_choice(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError for a value that is not one of `allowed`."""
    if value not in (allowed := tuple(allowed)):
        raise ValueError(f"anchorprune: {name} must be one of {', '.join(allowed)}, got {value!r}")


def check_keys(settings: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Raise ValueError for a key that is not one of `allowed`, and suggest the nearest one."""
    allowed = list(allowed)
    for key in settings:
        if key not in allowed:
            near = get_close_matches(str(key), allowed, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"anchorprune: unknown setting {key!r}{hint}; allowed: {', '.join(allowed)}"
            )


def check_number(
    name: str, value: object, allowed: str, is_allowed: Callable[[float], bool]
) -> None:
    """Raise ValueError for anything but a number in the range that `allowed` describes."""
    # NaN is refused too, because comparisons with it are false.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_allowed(value):
        raise ValueError(f"anchorprune: {name} must be a number {allowed}, got {value!r}")


def check_whole(name: str, value: object, *, low: int) -> None:
    """Raise ValueError for anything but a whole number of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(
            f"anchorprune: {name} must be a whole number of at least {low}, got {value!r}"
        )

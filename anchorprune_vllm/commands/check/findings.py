# SPDX-License-Identifier: Apache-2.0
"""What a check finds."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

SEND_REPORT = "Please send the report of --json"


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    status: Literal["ok", "FAILED", "skipped"]
    found: str  # in words; of a skipped check, the reason
    advice: str = ""  # what to do about a failure
    details: str = ""  # for the report alone: a traceback, or the end of a log

    @classmethod
    def of(cls, name: str, problem: str, advice: str, found: str) -> Finding:
        """Report a problem, or what was found if there is none."""
        return cls(name, "FAILED", problem, advice) if problem else cls(name, "ok", found)


def guarded(name: str, part: Callable[..., Iterator[Finding]], *args: object) -> Iterator[Finding]:
    """Run one part of the check; an error in it is a finding too, and the other parts go on.

    A kernel that does not compile or a GPU that gives up is just what a report is for.
    """
    try:
        yield from part(*args)
    except Exception as error:
        summary = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        advice = f"{SEND_REPORT}; until then, leave out --anchorprune-budget."
        yield Finding(name, "FAILED", summary, advice, traceback.format_exc())

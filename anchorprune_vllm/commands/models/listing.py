# SPDX-License-Identifier: Apache-2.0
"""The rows of `anchorprune models` and of docs/models.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anchorprune_vllm.commands.models.record import Architecture, Record, Trial
from anchorprune_vllm.models import ARCHITECTURES
from anchorprune_vllm.models.families import FAMILIES, packages_of_families


@dataclass(frozen=True)
class Row:
    """What is known about an architecture that takes images or videos."""

    architecture: str
    media: str
    level: str
    """full, reduced, no; or general if the level is found out when a checkpoint is loaded."""
    stated_by: str
    """What describes the model's vision tower to the adapter."""
    tested: str
    why: str
    """Why the architecture is refused or was not tried, or what was odd when it was."""


def make_rows(architectures: Mapping[str, Architecture], record: Record) -> list[Row]:
    """Return a row for each architecture that takes images or videos."""
    return [
        _make_row(name, found, record)
        for name, found in sorted(architectures.items())
        if found.media
    ]


def _make_row(name: str, found: Architecture, record: Record) -> Row:
    trials = [trial for trial in record.trials if trial.architecture == name]
    why = [found.refused] if found.refused else []
    why += [_reason(trial) for trial in trials if trial.outcome != "equal" or trial.why]
    if not trials and not found.refused:
        why.append(found.untried or "no tiny checkpoint yet")
    level, stated_by = _level(name, found, trials)
    tested = _tested(name, trials, has_reference=name in record.references)
    return Row(name, ", ".join(found.media), level, stated_by, tested, "; ".join(why))


def _level(name: str, found: Architecture, trials: Sequence[Trial]) -> tuple[str, str]:
    """Return the level of an architecture, and what states it."""
    if found.refused or (trials and all(trial.outcome == "refused" for trial in trials)):
        return "no", ""
    seen = next((trial.level for trial in trials if trial.level), None)
    if name in FAMILIES:
        return seen or "full", "family"
    if name in ARCHITECTURES:
        return "full", "own adapter"
    if package := packages_of_families().get(name):  # which was not installed when it was tried
        return "general", f"family of {package}"
    return seen or "general", "found at load"


def _tested(name: str, trials: Sequence[Trial], has_reference: bool) -> str:
    tests = ["reference"] if has_reference else []
    tests += ["engine"] if name in ARCHITECTURES else []
    outcomes = {trial.outcome for trial in trials}
    if "equal" in outcomes:
        tests.append("sweep")
    elif outcomes & {"unequal", "failed", "timed out"}:
        tests.append("sweep failed")
    elif "unserved" in outcomes:
        tests.append("tried: vLLM does not serve it")
    return " + ".join(tests) or "not tried"


def _reason(trial: Trial) -> str:
    """Say why answers in a trial differ, what its error was, or what was odd about it."""
    failed = ", ".join(name for name, held in trial.checks.items() if not held)
    return f"{trial.checkpoint} {trial.outcome}: {'; '.join(filter(None, [failed, trial.why]))}"

# SPDX-License-Identifier: Apache-2.0
"""vLLM's two model runners, as parameters of tests whose engines the fixture `runner` chooses."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import make_engine
from tests.support.second_runner import second_runner

RUNNERS = ("V1", "V2")

both_runners = pytest.mark.parametrize("runner", RUNNERS, indirect=True)


def runners_in_turn(name: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize with values, each for one of the runners.

    For grids of cases whose outcome does not depend on the runner.
    """
    cases = [(RUNNERS[place % len(RUNNERS)], value) for place, value in enumerate(values)]
    return pytest.mark.parametrize(("runner", name), cases, indirect=["runner"])


def engine_on(runner: str, model: Path, budget: Any, **options: Any) -> AbstractContextManager[Any]:
    """Start an engine on one of `RUNNERS`: an `LLM`, or what behaves like one."""
    return (make_engine if runner == "V1" else second_runner)(model, budget, **options)

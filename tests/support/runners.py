# SPDX-License-Identifier: Apache-2.0
"""vLLM's two model runners, as parameters of tests whose engines the fixture `runner` chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

RUNNERS = ("V1", "V2")
EITHER = "either"
"""The second runner for the models below, the first for the others."""
ON_BOTH = (
    *("llava-1.5", "qwen2.5-vl", "qwen3-vl"),
    *("glm-4v", "internvl", "smolvlm", "gemma4"),
    *("qwen3-vl-moe", "glm-4v-moe", "llama4"),
)
"""Models whose tests run on both: some of each kind, since Triton's interpreter is slow, and those
with experts, which the rehearsal cannot run. It has nearly all of the others."""

both_runners = pytest.mark.parametrize("runner", RUNNERS, indirect=True)


def runners_in_turn(name: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize with values, every other one for `EITHER` runner.

    For grids of cases whose outcome does not depend on the runner.
    """
    runners = (RUNNERS[0], EITHER)
    cases = [(runners[place % 2], value) for place, value in enumerate(values)]
    # By itself pytest would end the engine after each case, as one parameter is no fixture's.
    scope = "session"
    return pytest.mark.parametrize(("runner", name), cases, indirect=["runner"], scope=scope)


def runner_of(asked: str, model: str) -> str:
    """Return which of `RUNNERS` a test of a model gets that asks for one of them, or for either."""
    return RUNNERS[model in ON_BOTH] if asked == EITHER else asked


def is_left_out(parameters: Mapping[str, Any]) -> bool:
    """Whether a test with these parameters is of a model that has no tests on the second runner."""
    return parameters.get("runner") == "V2" and parameters.get("any_model") not in ON_BOTH


def engine_on(runner: str, model: Path, budget: Any, **options: Any) -> AbstractContextManager[Any]:
    """Start an engine on one of `RUNNERS`: an `LLM`, or what behaves like one."""
    # Only here: to share tests out among processes, no vLLM is needed.
    from tests.support.engine import make_engine
    from tests.support.second_runner import second_runner

    return (make_engine if runner == "V1" else second_runner)(model, budget, **options)

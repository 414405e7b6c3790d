# SPDX-License-Identifier: Apache-2.0
"""Every method on simulated CUDA, and every signal that methods ask of a model's vision tower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anchorprune_vllm.methods.registry import ANCHORPRUNE, names
from tests.rehearsal.comparison import Rehearsal
from tests.rehearsal.conftest import Rehearse
from tests.rehearsal.job import Engine, Job

SIGNALS = ("visionzip", "cdpruner", "hiprune")  # together they ask for all
METHODS = {
    "llava-1.5": tuple(name for name in names() if name != ANCHORPRUNE),
    "llava-next": SIGNALS,
    "qwen2.5-vl": SIGNALS,
    "llava-video": SIGNALS,
}
CASES = [
    pytest.param(arch, method, id=f"{arch}-{method}")
    for arch, methods in METHODS.items()
    for method in methods
]


@pytest.mark.parametrize(("arch", "method"), CASES)
def test_method(
    arch: str, method: str, small_models: Callable[[str], Path], rehearse: Rehearse
) -> None:
    engines = [Engine(name, ["pruned", "cached"], {"method": name}) for name in METHODS[arch]]
    job = Job(str(small_models(arch)), engines)
    rehearsal = Rehearsal(rehearse(job, "cpu")[method], rehearse(job, "V2")[method])
    rehearsal.check_platform("V2")
    rehearsal.check_answers()
    rehearsal.check_waits()
    rehearsal.check_metrics()

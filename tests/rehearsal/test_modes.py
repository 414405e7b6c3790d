# SPDX-License-Identifier: Apache-2.0
"""Modes of vLLM that change what kernels run on the device."""

from __future__ import annotations

from pathlib import Path

from tests.rehearsal.comparison import Rehearsal
from tests.rehearsal.conftest import Rehearse
from tests.rehearsal.job import Engine, Job


def test_batch_invariance(demo_model: Path, rehearse: Rehearse) -> None:
    """vLLM replaces operators of torch by Triton kernels, which know no float64."""
    engine = Engine("invariant", ["cached"], {"positions": "native"})
    job = Job(str(demo_model), [engine], variables={"VLLM_BATCH_INVARIANT": "1"})
    rehearsal = Rehearsal(rehearse(job, "cpu")["invariant"], rehearse(job, "V1")["invariant"])
    rehearsal.check_platform("V1")
    rehearsal.check_answers()
    rehearsal.check_waits(is_native=True)

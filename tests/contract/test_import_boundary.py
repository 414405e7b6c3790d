# SPDX-License-Identifier: Apache-2.0
"""What importing a part of the package may load; in a fresh process, as this one has loaded all."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded_by(module: str, candidates: list[str]) -> list[str]:
    program = f"import sys, {module}; print(*[m for m in {candidates} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("anchorprune_vllm", ["torch", "vllm", "transformers"]),
        ("anchorprune_vllm.budget", ["torch", "vllm", "transformers"]),
        ("anchorprune_vllm.selection", ["vllm", "transformers"]),
        ("anchorprune_vllm.signals.attention", ["vllm", "transformers", "triton"]),
        ("anchorprune_vllm.signals.clip", ["vllm"]),
        ("anchorprune_vllm.worker.pruner", ["vllm", "transformers"]),
    ],
)
def test_import_does_not_load(module, forbidden):
    assert loaded_by(module, forbidden) == []


def test_the_question_can_be_answered_with_yes():
    assert loaded_by("anchorprune_vllm.selection", ["torch"]) == ["torch"]

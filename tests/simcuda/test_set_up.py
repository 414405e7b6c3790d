# SPDX-License-Identifier: Apache-2.0
"""The device in processes of their own: how it gets there, and vLLM's own check of waits on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simcuda.environment import LIBRARY, with_simulated_cuda

ROOT = Path(__file__).parents[2]


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_compiler_is_said_at_once(tmp_path: Path) -> None:
    program = (
        "import tests.simcuda.build as build, pathlib\n"
        f"build._BUILT = pathlib.Path({str(tmp_path)!r})\n"
        "build.built_library()\n"
    )
    ended = run(program, CXX="no-such-compiler")
    assert ended.returncode != 0
    assert "no-such-compiler is not there: install one" in ended.stderr
    assert "apt-get install g++" in ended.stderr


UNDER_VLLMS_CHECK = """
import torch
from vllm.platforms import current_platform
from vllm.utils import gpu_sync_debug

assert current_platform.is_cuda() and current_platform.device_type == "cuda"
gpu_sync_debug.enable_gpu_sync_check()
x = torch.ones(3, device="cuda")

@gpu_sync_debug.with_gpu_sync_check
def checked(operation):
    operation(x)

def outcome(operation):
    try:
        checked(operation)
    except RuntimeError as error:
        return str(error).split(" detected")[0].rpartition(". ")[2]
    return "passed"

def allowed(x):
    with gpu_sync_debug.gpu_sync_allowed():
        x.tolist()

print(outcome(lambda x: x[0].item()))
print(outcome(lambda x: x[x > 0]))
print(outcome(lambda x: x.cpu()))
print(outcome(lambda x: torch.ones(3).to("cuda", non_blocking=True)))
print(outcome(lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True)))
print(outcome(allowed))
"""


def test_vllms_own_check_sees_waits() -> None:
    ended = run(UNDER_VLLMS_CHECK, VLLM_GPU_SYNC_CHECK="error", **with_simulated_cuda())
    assert ended.stdout.splitlines()[-6:] == [
        *["GPU<->CPU sync"] * 3,
        "Implicit GPU<->CPU sync",
        *["passed"] * 2,
    ], ended.stderr


def test_without_its_variable_nothing_is_simulated() -> None:
    variables = {**with_simulated_cuda(), LIBRARY: ""}
    program = (
        "import torch\n"
        "from tests.simcuda.vllm_platform import platform\n"
        "print(torch.cuda.is_available(), platform())"
    )
    ended = run(program, **variables)
    assert ended.stdout.split() == ["False", "None"], ended.stderr

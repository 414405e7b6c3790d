# SPDX-License-Identifier: Apache-2.0
"""What the host does beside a device: threads that others have bound, and copies."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from anchorprune_vllm.selection.device import to_device

BOUND = """
import os, threading, torch
torch.randn(2000, 2000) @ torch.randn(2000, 2000)  # starts torch's own threads
from anchorprune_vllm.selection.device import in_parallel

both = threading.Barrier(2)

def cores(_):
    both.wait(60)
    return sorted(os.sched_getaffinity(0))

print(sorted(os.sched_getaffinity(0)), in_parallel(cores, [1, 2]))
"""


def test_items_run_on_all_cores_of_a_bound_process() -> None:
    """As vLLM binds a CPU worker's threads, a core each."""
    one, *others = sorted(os.sched_getaffinity(0))[:2]
    cores = [one, *others]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "GOMP_CPU_AFFINITY": " ".join(map(str, cores)),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
    }
    ended = subprocess.run(
        [sys.executable, "-c", BOUND], env=env, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == f"{[one]} {[cores, cores]}".split()


def test_numbers_are_staged_on_the_host_while_a_model_loads() -> None:
    """vLLM builds models with the device as torch's default, and only host memory can be pinned."""
    with torch.device("meta"):
        staged = to_device([[1, 2], [3, 4]], torch.device("cpu"))
    assert staged.tolist() == [[1, 2], [3, 4]]

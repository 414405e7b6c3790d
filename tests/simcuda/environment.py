# SPDX-License-Identifier: Apache-2.0
"""The environment in which a Python process, and all that it starts, has the device."""

from __future__ import annotations

import os
from pathlib import Path

from tests.simcuda.build import built_library

LIBRARY = "SIMCUDA_LIBRARY"
"""Path of the compiled device; without it nothing here does anything."""

_ROOT = Path(__file__).parents[2]
_BOOT = Path(__file__).parent / "boot"  # Python runs its sitecustomize.py at start-up


def with_simulated_cuda() -> dict[str, str]:
    """Return the variables to set beside those that are there."""
    path = [str(_BOOT), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        LIBRARY: str(built_library()),
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_VISIBLE_DEVICES": "0",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",  # it would compile for a GPU
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a process that has used CUDA cannot be forked
    }

# SPDX-License-Identifier: Apache-2.0
"""The versions and the device that the other parts are checked with."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from anchorprune_vllm.commands.check.findings import Finding

_PACKAGES = ("anchorprune-vllm", "vllm", "torch", "transformers", "triton", "numba")


def device_here() -> torch.device:
    """Return the GPU that would be used, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine_facts() -> dict[str, str]:
    """Return what somebody needs to know who reads a report of another machine."""
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "missing"
    if device_here().type == "cpu":
        return facts | {"device": f"CPU, {torch.get_num_threads()} threads"}
    of_device = torch.cuda.get_device_properties(0)
    return facts | {
        "device": of_device.name,
        "compute capability": f"{of_device.major}.{of_device.minor}",
        "memory": f"{of_device.total_memory / 2**30:.0f} GiB",
        "CUDA": str(torch.version.cuda or torch.version.hip),
    }


def check_vllm() -> Iterator[Finding]:
    """See that this vLLM has all that pruning takes from it."""
    from anchorprune_vllm.vllm_patches.hooks import HOOKS, TESTED

    gone = [hook.target for hook in HOOKS if not hook.is_there()]
    if gone:
        yield Finding(
            "vLLM's hooks",
            "FAILED",
            f"vLLM {version('vllm')} lacks {', '.join(gone)}",
            f"Install a vLLM that was tested: {', '.join(TESTED)}.",
        )
    else:
        yield Finding("vLLM's hooks", "ok", f"all {len(HOOKS)} are in vLLM {version('vllm')}")

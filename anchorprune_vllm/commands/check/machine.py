# SPDX-License-Identifier: Apache-2.0
"""The versions, the device, and how long selection takes on it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from anchorprune_vllm.commands.bench.choices import Choice
from anchorprune_vllm.commands.bench.gpu_cost import CHOICES, cost_of, gpu_named
from anchorprune_vllm.commands.bench.measure import time_in_turns
from anchorprune_vllm.commands.check.findings import SEND_REPORT, Finding
from anchorprune_vllm.selection import AnchorParams, select_batch

_PACKAGES = ("anchorprune-vllm", "vllm", "torch", "transformers", "triton", "numba")
Times = dict[str, Any]
"""How long one choice takes here, and should take on this GPU: the columns of a table, by name."""

_REPEATS = 5
_SLOW = 3
"""At so many times the computed time, the model of the cost is wrong, or the kernel."""


def machine_facts() -> dict[str, str]:
    """Return what a reader of the report needs to know of this machine."""
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "missing"
    if not torch.cuda.is_available():
        return facts | {"device": f"CPU, {torch.get_num_threads()} threads"}
    device = torch.cuda.get_device_properties(0)
    return facts | {
        "device": device.name,
        "compute capability": f"{device.major}.{device.minor}",
        "memory": f"{device.total_memory / 2**30:.0f} GiB",
        "CUDA": str(torch.version.cuda or torch.version.hip),
    }


def check_vllm() -> Iterator[Finding]:
    """Look for everything that pruning takes from this vLLM."""
    from anchorprune_vllm.vllm_patches.hooks import HOOKS, TESTED

    installed = f"vLLM {version('vllm')}"
    gone = ", ".join(hook.target for hook in HOOKS if not hook.is_there())
    advice = f"Install a vLLM that was tested: {', '.join(TESTED)}."
    problem, found = gone and f"{installed} lacks {gone}", f"all {len(HOOKS)} are in {installed}"
    yield Finding.of("vLLM's hooks", problem, advice, found)


def measure_times(device: torch.device) -> list[Times]:
    """Time each choice of `bench gpu-cost`; on a CPU, those of fewer than 10,000 tokens."""
    choices = CHOICES if device.type == "cuda" else [c for c in CHOICES if c.tokens < 10_000]
    return [_measure(choice, device) for choice in choices]


def _measure(choice: Choice, device: torch.device) -> Times:
    select = partial(select_batch, choice.candidates(device), AnchorParams())
    (measured,) = time_in_turns([select], _REPEATS)
    row: dict[str, Any] = {"choice": choice.model, "tokens": choice.tokens, "budget": choice.budget}
    row["measured ms"] = round(measured, 3)
    gpu = gpu_named(torch.cuda.get_device_name()) if device.type == "cuda" else None
    if gpu is not None:
        cost = cost_of(choice, gpu)
        row["computed ms"] = round(1e3 * max(cost.device, cost.host), 3)
        row["pruned prefill ms, computed"] = round(1e3 * cost.prefill, 1)
    return row


def check_speed(device: torch.device, times: list[Times]) -> Iterator[Finding]:
    """Compare the times of selection with computed ones; what is measured is added to `times`."""
    times += measure_times(device)
    name = "time of choosing"
    known = [row for row in times if "computed ms" in row]
    ratios = [(row["measured ms"] / row["computed ms"], row["choice"]) for row in known]
    if not ratios:
        reason = "measured; nothing is computed for this device to compare it with"
        yield Finding(name, "skipped", reason)
        return
    ratio, choice = max(ratios)
    found = f"at most {ratio:.1f}x of what is computed ({choice})"
    advice = f"Answers are right, but selection is slow here. {SEND_REPORT}."
    yield Finding.of(name, found if ratio > _SLOW else "", advice, found)

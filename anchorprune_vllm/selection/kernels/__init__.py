# SPDX-License-Identifier: Apache-2.0
"""Fast forms of both stages, with numba on a CPU and with Triton on a GPU.

Both libraries come with vLLM. If they are missing, the plain form (`anchorprune.py`) is used.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from anchorprune_vllm.selection.anchorprune import Expand, contextual_expansion
from anchorprune_vllm.selection.device import reads_are_free
from anchorprune_vllm.selection.scores import Score


@cache
def host_expansion() -> Expand:
    """Return the fastest available form of Stage 2 for an item on the CPU."""
    if find_spec("numba") is None:
        return contextual_expansion
    from anchorprune_vllm.selection.kernels import cpu

    return cpu.expand


@cache
def runs_triton(device: torch.device) -> bool:
    """Return whether a device runs the Triton kernels; NVIDIA GPUs older than Ampere do not."""
    if device.type != "cuda" or find_spec("triton") is None:  # AMD GPUs are "cuda" too
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def expand_item(features: Tensor, score: Score, anchor: Tensor, budget: int) -> Tensor:
    """Choose the tokens of one item as `contextual_expansion` does, in the form for its device."""
    if reads_are_free(features):
        return host_expansion()(features, score, anchor, budget)
    if not runs_triton(features.device):
        return contextual_expansion(features, score, anchor, budget)
    from anchorprune_vllm.selection.kernels import gpu

    return gpu.expand(features, [len(features)], score, anchor, [budget]).chosen

# SPDX-License-Identifier: Apache-2.0
"""The forms of both stages, by where the items are.

numba and Triton come with vLLM. Where they are missing, the plain form in torch does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from anchorprune_vllm.selection import anchor, expansion
from anchorprune_vllm.selection.device import reads_are_free
from anchorprune_vllm.selection.expansion import Expansion, Score

ItemExpansion = Callable[[Tensor, Score, Tensor, int], Tensor]
"""As `expansion.expand`."""

BatchExpansion = Callable[[Tensor, Sequence[int], Score, Tensor, Sequence[int]], Expansion]
"""As `expansion.expand_one_by_one`."""


Anchoring = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[Sequence[anchor.Unit]], float, int], list[Tensor]
]
"""As `anchor.relevance_anchors`."""


def anchoring(device: torch.device) -> Anchoring:
    """Return the form of Stage 1 for items on a device, or on the CPU."""
    if not runs_triton(device):
        return anchor.relevance_anchors
    from anchorprune_vllm.selection.kernels import gpu_anchor

    return gpu_anchor.relevance_anchors


@cache
def host_expansion() -> ItemExpansion:
    """Return the form for an item on the CPU."""
    if find_spec("numba") is None:
        return expansion.expand
    from anchorprune_vllm.selection.kernels import cpu

    return cpu.expand


def device_expansion(device: torch.device) -> BatchExpansion:
    """Return the form for a batch on a device."""
    if not runs_triton(device):
        return expansion.expand_one_by_one
    from anchorprune_vllm.selection.kernels import gpu

    return gpu.expand


def expand_item(features: Tensor, score: Score, anchor: Tensor, budget: int) -> Tensor:
    """Choose the tokens of one item as `expansion.expand` does, by the form for where it is."""
    if reads_are_free(features):
        return host_expansion()(features, score, anchor, budget)
    expand_batch = device_expansion(features.device)
    return expand_batch(features, [len(features)], score, anchor, [budget]).chosen


@cache
def runs_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run there: not on NVIDIA GPUs older than Ampere."""
    if device.type != "cuda" or find_spec("triton") is None:  # cuda: AMD's too
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)

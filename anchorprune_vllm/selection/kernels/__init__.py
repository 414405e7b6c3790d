# SPDX-License-Identifier: Apache-2.0
"""The forms of Stage 2, by where an item is: the same choices everywhere.

numba and Triton come with vLLM. Where they are missing, the plain form in torch does it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from anchorprune_vllm.selection.cosine import unit_rows
from anchorprune_vllm.selection.expand import Worth, greedy_expansion, novelty_to_anchor

HostExpansion = Callable[[Tensor, Worth, Tensor, int], Tensor]
"""Features [N, D], their worth, the anchor [N], steps: choices [steps]."""

DeviceExpansion = Callable[[Tensor, Worth, Tensor, Tensor, Tensor, int], Tensor]
"""As `greedy_expansion`."""


@cache
def host_expansion() -> HostExpansion:
    if find_spec("numba") is None:
        return plain_host_expansion
    from anchorprune_vllm.selection.kernels.cpu import lazy_expansion

    return lazy_expansion


@cache
def device_expansion(device: torch.device) -> DeviceExpansion:
    if device.type != "cuda" or find_spec("triton") is None:  # cuda: AMD's too
        return greedy_expansion
    from anchorprune_vllm.selection.kernels.gpu import lazy_expansion

    return lazy_expansion


def plain_host_expansion(features: Tensor, worth: Worth, anchor: Tensor, steps: int) -> Tensor:
    """One item through the form for batches."""
    rows, taken = unit_rows(features)[None], anchor[None]
    novelty = novelty_to_anchor(rows, taken, int(anchor.sum()))
    return greedy_expansion(rows, worth.batched(), novelty, taken, torch.tensor([steps]), steps)[0]

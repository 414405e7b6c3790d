# SPDX-License-Identifier: Apache-2.0
"""The optimisers of the training: Muon for the matrices inside a model, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by Newton and Schulz (Keller Jordan, 2024), in float32.

    PyTorch's own computes in bfloat16, one matrix after the other: on a CPU that takes a third of
    a step. Here matrices of one shape go together.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        super().__init__([{"params": found} for found in by_shape.values()], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if not parameters:
                continue
            updates = []
            for parameter in parameters:
                momentum = self.state[parameter].setdefault("momentum", parameter * 0)
                momentum.lerp_(parameter.grad, 0.05)
                updates.append(parameter.grad.lerp(momentum, 0.95))
            wanted = orthogonal(torch.stack(updates))
            # The root mean square of AdamW's steps, whatever the shape (Moonlight, 2025).
            rate = 0.2 * group["lr"] * max(wanted.shape[1:]) ** 0.5
            for parameter, update in zip(parameters, wanted, strict=True):
                parameter.mul_(1 - 0.01 * group["lr"]).sub_(update, alpha=rate)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices [B, M, N] with singular values near 1 and the same singular vectors."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if is_tall else matrices
    found = found / (torch.linalg.matrix_norm(found, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = found @ found.mT
        found = 3.4445 * found + (-4.7750 * gram + 2.0315 * gram @ gram) @ found
    return found.mT if is_tall else found


def optimizers_of(named: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Return Muon over the matrices inside a model, and AdamW over tables, vectors and filters.

    named: the parameters to train, with their names.
    """
    inside, rest = [], []
    for name, parameter in named:
        is_table = "embed" in name or "lm_head" in name
        (inside if parameter.ndim == 2 and not is_table else rest).append(parameter)
    return [
        Muon(inside, lr=3e-3),
        torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98)),
    ]

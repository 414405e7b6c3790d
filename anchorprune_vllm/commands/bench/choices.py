# SPDX-License-Identifier: Apache-2.0
"""What benchmarks select tokens from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anchorprune_vllm.commands.bench.flops import VICUNA_7B, Transformer
from anchorprune_vllm.selection import Candidates


@dataclass(frozen=True)
class Choice:
    """Images or videos of one model whose tokens are selected in one call."""

    model: str
    tokens: int  # N of each
    budget: int  # K of each
    anchor_size: int = 768  # width of the features of Stage 1
    context_size: int = 1024  # width of the features of Stage 2
    language_model: Transformer = VICUNA_7B
    units: int = 1
    items: int = 1

    def candidates(
        self, device: torch.device | str, dtype: torch.dtype = torch.bfloat16
    ) -> list[Candidates]:
        """Draw the items at random; features are correlated, as those of neighbouring patches."""

        def features(size: int) -> Tensor:
            shared = torch.randn(-(-self.tokens // 8), size, device=device, dtype=dtype)
            own = torch.randn(self.tokens, size, device=device, dtype=dtype)
            return shared.repeat_interleave(8, 0)[: self.tokens] + 0.5 * own

        units = torch.arange(self.units).repeat_interleave(self.tokens // self.units)
        return [
            Candidates(
                relevance=torch.randn(self.tokens, device=device, dtype=dtype),
                features=features(self.anchor_size),
                importance=torch.rand(self.tokens, device=device, dtype=dtype),
                budget=self.budget,
                context_features=features(self.context_size),
                units=units if self.units > 1 else None,
            )
            for _ in range(self.items)
        ]

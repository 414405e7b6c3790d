# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench gpu-cost`: what choosing costs on GPUs that are not here. Computed.

A launch takes as long as the slowest of what it needs: its arithmetic, its traffic with memory and
with the L2 cache, the dependent steps of its programs, and at least what any launch takes. What is
counted is in `launches.py`, what GPUs can do in `gpus.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from anchorprune_vllm.commands.bench import gpus
from anchorprune_vllm.commands.bench.flops import Tower, Transformer
from anchorprune_vllm.commands.bench.gpus import GPUS, Gpu
from anchorprune_vllm.commands.bench.launches import Launch, counted
from anchorprune_vllm.commands.bench.shapes import SHAPES
from anchorprune_vllm.selection import Candidates

QUESTION_TOKENS = 50
"""Of text in each prompt: template and question."""


@dataclass(frozen=True)
class Choice:
    """Images or videos of one model, from which tokens are chosen at once."""

    model: str
    tokens: int  # N of each
    budget: int  # K of each
    anchor_size: int  # width of the features of Stage 1
    context_size: int  # width of the features of Stage 2
    language_model: Transformer
    units: int = 1
    items: int = 1

    def candidates(self, device: str = "meta") -> list[Candidates]:
        """Return the items: of half precision, as served models are."""
        units = torch.arange(self.units).repeat_interleave(self.tokens // self.units)

        def numbers(*shape: int) -> torch.Tensor:
            if device == "meta":
                return torch.empty(shape, dtype=torch.bfloat16, device=device)
            return torch.randn(shape, dtype=torch.bfloat16, device=device)

        return [
            Candidates(
                numbers(self.tokens),
                numbers(self.tokens, self.anchor_size),
                numbers(self.tokens).abs(),
                self.budget,
                numbers(self.tokens, self.context_size),
                units if self.units > 1 else None,
            )
            for _ in range(self.items)
        ]


_VICUNA = SHAPES["llava-1.5"].language_model
_QWEN = SHAPES["qwen2.5-vl"].language_model

CHOICES = (
    Choice("LLaVA-1.5-7B, an image", 576, 64, 768, 1024, _VICUNA),
    Choice("LLaVA-NeXT-7B, an image with crops", 2880, 640, 768, 1024, _VICUNA, units=5),
    Choice("Qwen2.5-VL-7B, an image", 1296, 256, 3584, 3584, _QWEN),
    Choice("Qwen2.5-VL-7B, a video", 10368, 512, 3584, 3584, _QWEN),
    Choice("Qwen2.5-VL-7B, a photo of 12 megapixels", 15552, 1555, 3584, 3584, _QWEN),
    Choice("LLaVA-1.5-7B, 32 images", 576, 64, 768, 1024, _VICUNA, items=32),
)


TOWERS = {
    "Qwen2.5-VL-7B": Tower(
        Transformer(32, 1280, 3420, 3),
        projector=5120 * (5120 + 3584),
        projected_per_patch=1 / 4,
        window=64,
        whole_blocks=4,
    ),
    # A merger for the tokens, and three for DeepStack's levels.
    "Qwen3-VL-8B": Tower(
        Transformer(27, 1152, 4304),
        projector=4 * 4608 * (4608 + 4096),
        projected_per_patch=1 / 4,
    ),
}
"""Towers whose importance is received attention; a visual token is 4 patches."""
IMAGES = (1024, 4096, 16384)
"""Visual tokens of images for which importance is counted."""


class Cost(NamedTuple):
    """Seconds, computed."""

    device: float  # that the GPU is busy with choosing
    host: float  # that the host needs to launch it all; hidden while the GPU still has work
    prefill: float  # of the prompts with the tokens that were chosen


def cost_of(choice: Choice, gpu: Gpu) -> Cost:
    """Compute what a choice costs on a GPU, beside the prefill that follows it."""
    launches = counted(choice.candidates())
    return Cost(
        sum(seconds(launch, gpu) for launch in launches),
        sum(_host_seconds(launch) for launch in launches),
        prefill_seconds(choice, gpu),
    )


def seconds(launch: Launch, gpu: Gpu) -> float:
    """Compute how long the GPU is busy with one launch."""
    at_once = gpu.multiprocessors * launch.programs_at_once
    return max(
        launch.kernels * gpus.LAUNCH_SECONDS,
        launch.half_operations / gpu.half_flops / gpus.TENSOR_SHARE,
        launch.single_operations / gpu.single_flops / gpus.TENSOR_SHARE,
        launch.memory_bytes / gpu.memory_bandwidth / gpus.MEMORY_SHARE,
        launch.cache_bytes / gpu.cache_bandwidth,
        launch.cycles * math.ceil(launch.programs / at_once) / gpu.clock,
    )


def _host_seconds(launch: Launch) -> float:
    return gpus.TRITON_HOST_SECONDS if launch.is_triton else gpus.TORCH_HOST_SECONDS


def prefill_seconds(choice: Choice, gpu: Gpu) -> float:
    """Compute the prefill of the pruned prompts, all of them in one step."""
    prompt = choice.budget + QUESTION_TOKENS
    arithmetic = choice.items * choice.language_model.flops(prompt)
    weights = 2 * choice.language_model.parameters  # bytes; each is read once
    return max(
        arithmetic / gpu.half_flops / gpus.PREFILL_SHARE,
        weights / gpu.memory_bandwidth / gpus.MEMORY_SHARE,
    )


def run_gpu_cost() -> None:
    """Print what is counted, then what that costs on each GPU."""
    console = Console()
    console.print(counts_table(CHOICES))
    for gpu in GPUS:
        console.print(cost_table(CHOICES, gpu))
    console.print(importance_table(TOWERS))
    console.print(
        "Computed from counted launches, bytes and operations; nothing here was measured on a "
        "GPU.\nThe host's time is hidden while the GPU still has work: it adds to the prompt's "
        "only where the GPU would wait for it.\n[bold]anchorprune check[/bold] measures, on the "
        "GPU that it finds."
    )


def counts_table(choices: Sequence[Choice]) -> Table:
    """Make the table of what is counted, which is the same for every GPU."""
    table = _table(
        "What choosing gives a GPU to do",
        *("N", "K", "launches", "dependent steps", "memory", "L2 cache", "operations"),
    )
    for choice in choices:
        launches = counted(choice.candidates())
        steps = str(sum(each.steps for each in launches))
        operations = sum(each.half_operations + each.single_operations for each in launches)
        table.add_row(
            choice.model,
            *(f"{choice.tokens:,}", str(choice.budget), str(len(launches)), steps),
            f"{sum(each.memory_bytes for each in launches) / 1e6:,.1f} MB",
            f"{sum(each.cache_bytes for each in launches) / 1e6:,.0f} MB",
            f"{operations / 1e9:,.1f} GFLOP",
        )
    return table


def cost_table(choices: Sequence[Choice], gpu: Gpu) -> Table:
    """Make the table of what choosing costs on one GPU."""
    table = _table(
        f"Choosing on an {gpu.name}, computed",
        *("N", "K", "choosing", "pruned prefill", "share", "host"),
    )
    for choice in choices:
        cost = cost_of(choice, gpu)
        table.add_row(
            choice.model,
            *(f"{choice.tokens:,}", str(choice.budget)),
            f"{1e3 * cost.device:.2f} ms",
            f"{1e3 * cost.prefill:.1f} ms",
            f"{cost.device / cost.prefill:.1%}",
            f"{1e3 * cost.host:.2f} ms",
        )
    return table


def importance_table(towers: Mapping[str, Tower]) -> Table:
    """Make the table of what importance adds to a vision tower, by operations."""
    table = _table(
        "Importance beside the tower that it is read from, by operations",
        *("visual tokens", "tower", "importance", "share"),
        first="vision tower",
    )
    for name, tower in towers.items():
        for tokens in IMAGES:
            whole, importance = tower.flops(1, 4 * tokens), tower.importance_flops(4 * tokens)
            table.add_row(
                *(name, f"{tokens:,}", f"{whole / 1e12:.1f} TFLOP"),
                *(f"{importance / 1e12:.2f} TFLOP", f"{importance / whole:.1%}"),
            )
    return table


def _table(title: str, *columns: str, first: str = "what is chosen from") -> Table:
    table = Table(first, title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table

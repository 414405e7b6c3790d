# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench gpu-cost`: compute what selection costs on GPUs that are not here.

A launch takes as long as the slowest thing that it needs: its arithmetic, its traffic with memory
and with the L2 cache, the dependent steps of its programs, and at least what an empty launch takes.
`launches.py` counts the work; what a GPU reaches of its data sheet is assumed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from anchorprune_vllm.commands.bench.choices import Choice
from anchorprune_vllm.commands.bench.flops import QWEN_7B, VICUNA_7B, Tower, Transformer
from anchorprune_vllm.commands.bench.launches import Launch, count_launches
from anchorprune_vllm.commands.bench.measure import table

TENSOR_SHARE = 0.5  # of the tensor cores' peak, reached by our products of small tiles
PREFILL_SHARE = 0.55  # of that peak, reached by the language model's prefill
MEMORY_SHARE = 0.8  # of the memory's bandwidth
CACHE_BYTES_PER_CYCLE = 16  # read by a multiprocessor from the L2 cache: a quarter of its port
LAUNCH_SECONDS = 2.5e-6  # of a kernel with next to nothing to do, between its neighbours
TORCH_HOST_SECONDS = 6e-6  # that the host spends on an operation of torch
TRITON_HOST_SECONDS = 30e-6  # that the host spends on a launch of a Triton kernel

QUESTION_TOKENS = 50  # of text in each prompt: template and question
IMAGES = (1024, 4096, 16384)  # visual tokens of images for which importance is counted


class Gpu(NamedTuple):
    """The figures of NVIDIA's data sheet; half precision is dense, without sparsity."""

    name: str
    multiprocessors: int
    clock: float  # Hz, boost
    half_flops: float  # per second, bfloat16 or float16 on tensor cores
    single_flops: float  # per second, float32 outside of them
    memory_bandwidth: float  # bytes per second


GPUS = (
    Gpu("A100 (80 GB, SXM)", 108, 1.410e9, 312e12, 19.5e12, 2.039e12),
    Gpu("H100 (80 GB, SXM)", 132, 1.830e9, 989e12, 67e12, 3.350e12),
    Gpu("L4", 58, 2.040e9, 121e12, 30.3e12, 0.300e12),
)

CHOICES = (
    Choice("LLaVA-1.5-7B, an image", 576, 64, 768, 1024, VICUNA_7B),
    Choice("LLaVA-NeXT-7B, an image with crops", 2880, 640, 768, 1024, VICUNA_7B, units=5),
    Choice("Qwen2.5-VL-7B, an image", 1296, 256, 3584, 3584, QWEN_7B),
    Choice("Qwen2.5-VL-7B, a video", 10368, 512, 3584, 3584, QWEN_7B),
    Choice("Qwen2.5-VL-7B, a photo of 12 megapixels", 15552, 1555, 3584, 3584, QWEN_7B),
    Choice("LLaVA-1.5-7B, 32 images", 576, 64, 768, 1024, VICUNA_7B, items=32),
)

# Towers whose importance is received attention; a visual token is 4 patches.
TOWERS = {
    "Qwen2.5-VL-7B": Tower(
        Transformer(32, 1280, 3420, 3),
        projector=5120 * (5120 + 3584),
        projected_per_patch=1 / 4,
        window=64,
        full_blocks=4,
    ),
    "Qwen3-VL-8B": Tower(
        Transformer(27, 1152, 4304),
        projector=4 * 4608 * (4608 + 4096),  # one for the tokens, three for DeepStack's levels
        projected_per_patch=1 / 4,
    ),
}


def gpu_named(name: str) -> Gpu | None:
    """Return the GPU that torch calls by this name, such as "NVIDIA A100-SXM4-80GB"."""
    words = name.replace("-", " ").split()
    return next((gpu for gpu in GPUS if gpu.name.split()[0] in words), None)


@dataclass(frozen=True)
class Cost:
    """Computed seconds of one choice."""

    device: float  # that the GPU is busy with selection
    host: float  # that the host needs to launch it, hidden while the GPU still has work
    prefill: float  # of the pruned prompts


def cost_of(choice: Choice, gpu: Gpu) -> Cost:
    """Compute what a choice costs on a GPU, and the prefill that follows it."""
    launches = count_launches(choice.candidates("meta"))
    triton = sum(launch.is_triton for launch in launches)
    return Cost(
        device=sum(launch_seconds(launch, gpu) for launch in launches),
        host=triton * TRITON_HOST_SECONDS + (len(launches) - triton) * TORCH_HOST_SECONDS,
        prefill=prefill_seconds(choice, gpu),
    )


def launch_seconds(launch: Launch, gpu: Gpu) -> float:
    """Compute how long the GPU is busy with one launch."""
    waves = ceil(launch.programs / (gpu.multiprocessors * launch.programs_at_once))
    flops = gpu.half_flops if launch.on_tensor_cores else gpu.single_flops
    cache_bandwidth = CACHE_BYTES_PER_CYCLE * gpu.multiprocessors * gpu.clock
    return max(
        launch.kernels * LAUNCH_SECONDS,
        launch.operations / flops / TENSOR_SHARE,
        launch.memory_bytes / gpu.memory_bandwidth / MEMORY_SHARE,
        launch.cache_bytes / cache_bandwidth,
        launch.cycles * waves / gpu.clock,
    )


def prefill_seconds(choice: Choice, gpu: Gpu) -> float:
    """Compute the prefill of the pruned prompts, all of them in one step."""
    operations = choice.items * choice.language_model.flops(choice.budget + QUESTION_TOKENS)
    weights = 2 * choice.language_model.parameters  # bytes, each of which is read once
    return max(
        operations / gpu.half_flops / PREFILL_SHARE,
        weights / gpu.memory_bandwidth / MEMORY_SHARE,
    )


def run_gpu_cost() -> None:
    """Print what is counted, then what that costs on each GPU."""
    console = Console()
    console.print(_work_table())
    for gpu in GPUS:
        console.print(_cost_table(gpu))
    console.print(_importance_table())
    console.print(
        "Computed from counted launches, bytes and operations; nothing here was measured on a "
        "GPU.\nThe host's time is hidden while the GPU still has work: it adds to the prompt's "
        "only where the GPU would wait for it.\n[bold]anchorprune check[/bold] measures, on the "
        "GPU that it finds."
    )


def _work_table() -> Table:
    rows = []
    for choice in CHOICES:
        launches = count_launches(choice.candidates("meta"))
        rows.append(
            [
                *(choice.model, f"{choice.tokens:,}", choice.budget),
                *(len(launches), sum(each.steps for each in launches)),
                f"{sum(each.memory_bytes for each in launches) / 1e6:,.1f} MB",
                f"{sum(each.cache_bytes for each in launches) / 1e6:,.0f} MB",
                f"{sum(each.operations for each in launches) / 1e9:,.1f} GFLOP",
            ]
        )
    columns = ["candidates", "N", "K", "launches", "dependent steps", "memory", "L2 cache"]
    return table("What selection gives a GPU to do", [*columns, "operations"], rows)


def _cost_table(gpu: Gpu) -> Table:
    rows = []
    for choice in CHOICES:
        cost = cost_of(choice, gpu)
        rows.append(
            [
                *(choice.model, f"{choice.tokens:,}", choice.budget),
                *(f"{1e3 * cost.device:.2f} ms", f"{1e3 * cost.prefill:.1f} ms"),
                *(f"{cost.device / cost.prefill:.1%}", f"{1e3 * cost.host:.2f} ms"),
            ]
        )
    columns = ["candidates", "N", "K", "selection", "pruned prefill", "share", "host"]
    return table(f"Selection on an {gpu.name}, computed", columns, rows)


def _importance_table() -> Table:
    rows = []
    for name, tower in TOWERS.items():
        for tokens in IMAGES:
            whole, importance = tower.flops(1, 4 * tokens), tower.importance_flops(4 * tokens)
            flops = (f"{whole / 1e12:.1f} TFLOP", f"{importance / 1e12:.2f} TFLOP")
            rows.append([name, f"{tokens:,}", *flops, f"{importance / whole:.1%}"])
    columns = ["vision tower", "visual tokens", "tower", "importance", "share"]
    return table("Importance next to the tower that it is read from, by operations", columns, rows)

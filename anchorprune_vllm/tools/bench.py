# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench`: what selection costs, side by side in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel

from anchorprune_vllm.budget import max_anchor, min_anchor, unit_budgets
from anchorprune_vllm.selection import AnchorParams, Candidates, select_batch
from anchorprune_vllm.signals.attention import cls_attention
from anchorprune_vllm.tools.bench_attention import measure_received_attention
from anchorprune_vllm.tools.bench_memory import measure_peak_memory
from anchorprune_vllm.tools.bench_support import side_by_side

PARAMS = AnchorParams()


@dataclass(frozen=True)
class Shape:
    """The candidates of one image of a model."""

    model: str
    tokens: int
    anchor_size: int
    context_size: int
    budget: int
    units: int = 1


SHAPES = (
    Shape("LLaVA-1.5", 576, 768, 1024, 64),
    Shape("LLaVA-NeXT", 2880, 768, 1024, 640, units=5),
    Shape("Qwen2.5-VL", 1296, 3584, 3584, 256),
)


def run_bench(repeats: int) -> None:
    """Print all tables."""
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    torch.manual_seed(0)

    table = Table(title=f"Selection of one image, median of {repeats} ({where})")
    for column in ("model", "N", "K", "straightforward loop", "anchorprune", "speed-up"):
        table.add_column(column, justify="left" if column == "model" else "right")
    selection_ms = {}
    for shape in track(SHAPES, "selection", console=console, transient=True):
        item = _random_candidates(shape, device)
        kept = select_batch([item], PARAMS)[0].indices
        if len(set(kept.tolist()) ^ set(straightforward(item).tolist())) > shape.budget // 50:
            raise RuntimeError(f"the two forms disagree on {shape}")
        loop, ours = side_by_side(
            [partial(straightforward, item), partial(select_batch, [item], PARAMS)], repeats
        )
        selection_ms[shape.model] = ours
        numbers = (str(shape.tokens), str(shape.budget), f"{loop:.1f} ms", f"{ours:.1f} ms")
        table.add_row(shape.model, *numbers, f"{loop / ours:.2f}x")
    console.print(table)

    table = Table(title=f"One image with crops (5 x 576) against one without ({where})")
    for column in ("share kept", "K of 576", "time", "K of 5 x 576", "time", "ratio"):
        table.add_column(column, justify="right")
    for budget in track((32, 64, 128), "crops", console=console, transient=True):
        shapes = (
            Shape("LLaVA-1.5", 576, 768, 1024, budget),
            Shape("LLaVA-NeXT", 2880, 768, 1024, 5 * budget, units=5),
        )
        runs: list[Callable[[], object]] = [
            partial(select_batch, [_random_candidates(shape, device)], PARAMS) for shape in shapes
        ]
        one, five = side_by_side(runs, repeats)
        table.add_row(
            f"{budget / 576:.1%}",
            *(str(budget), f"{one:.1f} ms"),
            *(str(5 * budget), f"{five:.1f} ms"),
            f"{five / one:.1f}x",
        )
    console.print(table)

    with console.status("a vision tower of LLaVA-1.5's size"):
        tower_ms, attention_ms = _tower_call(device, min(repeats, 5))
    table = Table(title=f"Against one call of LLaVA-1.5's vision tower, one image ({where})")
    for column in ("step", "time", "share of the tower's"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for step, spent in (
        ("vision tower (ViT-L/14 at 336 px, 23 layers)", tower_ms),
        ("[CLS] attention", attention_ms),
        ("selection, K=64", selection_ms["LLaVA-1.5"]),
    ):
        table.add_row(step, f"{spent:.2f} ms", f"{spent / tower_ms:.2%}")
    console.print(table)

    with console.status("received attention in vLLM's Qwen2.5-VL"):
        costs = measure_received_attention([32, 64, 128], min(repeats, 2))
    table = Table(title=f"Received attention, and the Qwen2.5-VL tower it is taken from ({where})")
    for column in ("patches", "tower", "with importance", "tower, peak", "with importance, peak"):
        table.add_column(column, justify="right")
    for cost in costs:
        table.add_row(
            str(cost.patches),
            f"{cost.tower_ms:.0f} ms",
            f"{cost.with_importance_ms:.0f} ms ({cost.with_importance_ms / cost.tower_ms:.2f}x)",
            f"{cost.tower_mebibytes:.0f} MiB",
            f"{cost.with_importance_mebibytes:.0f} MiB "
            f"({cost.with_importance_mebibytes / cost.tower_mebibytes:.2f}x)",
        )
    console.print(table)

    with console.status("peak memory of vLLM's LLaVA-NeXT"):
        unpruned, *pruned = measure_peak_memory(["100%", 640, 320, 160])
    table = Table(title=f"Peak memory of one LLaVA-NeXT call, 7B widths ({where})")
    for column in ("budget", "tokens", "peak above weights", "of the unpruned"):
        table.add_column(column, justify="right")
    for peak in (unpruned, *pruned):
        table.add_row(
            str(peak.budget),
            str(peak.tokens),
            f"{peak.mebibytes:.1f} MiB",
            f"{peak.mebibytes / unpruned.mebibytes:.1%}",
        )
    console.print(table)


def straightforward(item: Candidates) -> Tensor:
    """The method as one would write it down: one product and one argmax per step, float32."""
    assert item.relevance is not None
    assert item.context_features is not None
    features = F.normalize(item.features.float(), dim=-1)
    context = F.normalize(item.context_features.float(), dim=-1)
    units = item.units if item.units is not None else torch.zeros(len(features), dtype=torch.long)
    sizes = torch.unique_consecutive(units, return_counts=True)[1].tolist()
    kept: list[int] = []
    start = 0
    for size, share in zip(sizes, unit_budgets(item.budget, sizes), strict=True):
        order = (start + item.relevance[start : start + size].argsort(descending=True)).tolist()
        smallest = min_anchor(share)
        largest = max_anchor(share, smallest, PARAMS.max_anchor_ratio)
        novel, end = 0, smallest
        while end < largest and novel < PARAMS.patience:
            distance = (1 - features[order[:smallest]] @ features[order[end]]).min()
            novel += int(distance > PARAMS.tau)
            end += 1
        kept += order[:end]
        start += size
    novelty = (1 - context @ context[kept].T).amin(1)
    while len(kept) < item.budget:
        score = item.importance * novelty
        score[kept] = -torch.inf
        kept.append(int(score.argmax()))
        novelty = novelty.minimum(1 - context @ context[kept[-1]])
    return torch.tensor(sorted(kept))


def _random_candidates(shape: Shape, device: torch.device) -> Candidates:
    """Correlated features, as neighbouring patches have."""

    def smooth(size: int) -> Tensor:
        base = torch.randn(shape.tokens // 8, size, device=device).repeat_interleave(8, 0)
        return base + 0.5 * torch.randn(shape.tokens, size, device=device)

    units = torch.arange(shape.units).repeat_interleave(shape.tokens // shape.units)
    return Candidates(
        relevance=torch.randn(shape.tokens, device=device),
        features=smooth(shape.anchor_size),
        importance=torch.rand(shape.tokens, device=device),
        budget=shape.budget,
        context_features=smooth(shape.context_size),
        units=units if shape.units > 1 else None,
    )


def _tower_call(device: torch.device, repeats: int) -> tuple[float, float]:
    config = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=23,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with torch.device(device), torch.inference_mode():
        tower = CLIPVisionModel(config).to(dtype).eval()
        pixels = torch.randn(1, 3, 336, 336, dtype=dtype)
        query, key = torch.randn(2, 1, 577, 1024, dtype=dtype)
        tower_ms, attention_ms = side_by_side(
            [lambda: tower(pixels), lambda: cls_attention(query, key, 16, 0.125)], repeats
        )
    return tower_ms, attention_ms

# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench parts`: what each part of pruning costs, in tables."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.utils.logging import disable_progress_bar

from anchorprune_vllm.budget import min_anchor
from anchorprune_vllm.commands.bench import towers
from anchorprune_vllm.commands.bench.choices import Choice
from anchorprune_vllm.commands.bench.flops import QWEN_7B
from anchorprune_vllm.commands.bench.measure import (
    resident_peak_bytes,
    table,
    this_device,
    time_in_turns,
)
from anchorprune_vllm.commands.bench.towers import beside
from anchorprune_vllm.selection import AnchorParams, Candidates, KeptTokens, select_batch
from anchorprune_vllm.selection.units import anchored_units
from anchorprune_vllm.signals.attention import cls_attention

Selector = Callable[[Candidates], Tensor]
"""Returns the indices of the tokens to keep, ascending."""

_CHOICES = (
    Choice("LLaVA-1.5", 576, 32),
    Choice("LLaVA-1.5", 576, 64),
    Choice("LLaVA-NeXT", 2880, 640, units=5),
    Choice("Qwen2.5-VL", 1296, 256, 3584, 3584, QWEN_7B),
    Choice("LLaVA-Video", 2704, 512, 1152, 1152, QWEN_7B, units=16),
    Choice("LLaVA-Video, 64 frames", 10368, 512, 1152, 1152, QWEN_7B, units=64),
)
_LENGTHS = (576, 1024, 2048, 4096, 8192, 16384)


def run_parts(repeats: int, authors: Path | None = None, only: str | None = None) -> None:
    """Print all tables, each as soon as it is measured.

    Args:
        repeats: how often each time is measured.
        authors: a clone of the paper's repository, whose selector is timed beside ours.
        only: the name of the one table to print.
    """
    console = Console()
    disable_progress_bar()  # transformers would show it between the tables
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    others = [] if authors is None else [authors_selector(authors)]
    parts: dict[str, Callable[[], Table]] = {
        "selection": lambda: _selection(repeats, others),
        "growth of selection": lambda: _selection_growth(repeats),
        "crops": lambda: _crops(repeats),
        "steps": lambda: _steps(repeats),
        "received attention": towers.received_attention_table,
        "received attention alone": lambda: towers.attention_growth_table(_LENGTHS, repeats),
        "videos": lambda: towers.videos_table(repeats),
        "peak memory": lambda: towers.peak_memory_table(repeats),
    }
    if only is not None and only not in parts:
        raise ValueError(f"{only!r} is not one of {', '.join(parts)}")
    for name in parts if only is None else [only]:
        with console.status(f"measuring: {name}"):
            made = parts[name]()
        made.title = f"{made.title} ({where})"
        console.print(made)


def _selection(repeats: int, others: Sequence[Selector]) -> Table:
    rows = []
    for choice in _CHOICES:
        (item,) = choice.candidates(this_device(), torch.float32)
        # The authors' selector cannot handle several units.
        selectors = [straightforward, *(others if choice.units == 1 else ())]
        kept = set(_select(item)[0].indices.tolist())
        for selector in selectors:
            if len(kept.symmetric_difference(selector(item).tolist())) > choice.budget // 50:
                raise RuntimeError(f"{selector.__name__} and ours disagree on {choice}")
        runs: list[Callable[[], object]] = [partial(_select, item)]
        runs += [partial(selector, item) for selector in selectors]
        ours, *slower = time_in_turns(runs, repeats)
        row = [choice.model, choice.tokens, choice.budget, f"{ours:.1f} ms"]
        rows.append([*row, *(beside(spent, ours, "ms", digits=1) for spent in slower)])
    columns = ["model", "N", "K", "ours", "straightforward loop", *(["the authors'"] * len(others))]
    return table(f"Selection of one image or video, median of {repeats}", columns, rows)


def _selection_growth(repeats: int) -> Table:
    rows = []
    for tokens in _LENGTHS:
        budget = tokens // 9
        (item,) = Choice("", tokens, budget).candidates(this_device(), torch.float32)
        (spent,) = time_in_turns([partial(_select, item)], min(repeats, 3))
        peak = resident_peak_bytes(partial(_select, item))
        row = [tokens, budget, f"{spent:.1f} ms", f"{1e6 * spent / tokens / budget:.1f} ns"]
        rows.append([*row, f"{peak / 2**20:.1f} MiB", f"{peak / 2**10 / tokens:.1f} KiB"])
    columns = ["N", "K", "time", "per N x K", "peak", "per token"]
    return table("Selection of one token in nine", columns, rows)


def _crops(repeats: int) -> Table:
    rows = []
    for budget in (32, 64, 128):
        choices = Choice("", 576, budget), Choice("", 2880, 5 * budget, units=5)
        items = [choice.candidates(this_device(), torch.float32)[0] for choice in choices]
        one, five = time_in_turns([partial(_select, item) for item in items], repeats)
        times = [budget, f"{one:.1f} ms", 5 * budget, f"{five:.1f} ms"]
        rows.append([f"{budget / 576:.1%}", *times, f"{five / one:.1f}x"])
    columns = ["share kept", "K of 576", "time", "K of 5 x 576", "time", "ratio"]
    return table("One image with crops (5 x 576) against one without", columns, rows)


def _steps(repeats: int) -> Table:
    """Time LLaVA-1.5's vision tower, and what pruning adds to it."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    config = CLIPVisionConfig(num_hidden_layers=23, image_size=336, patch_size=14, **sizes)
    device = this_device()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    (item,) = Choice("", 576, 64).candidates(device, torch.float32)
    with torch.device(device), torch.inference_mode():
        tower = CLIPVisionModel(config).to(dtype).eval()
        query, key = torch.randn(2, 1, 577, 1024, dtype=dtype)
        runs: dict[str, Callable[[], object]] = {
            "vision tower (ViT-L/14 at 336 px, 23 layers)": partial(
                tower, torch.randn(1, 3, 336, 336, dtype=dtype)
            ),
            "[CLS] attention": partial(cls_attention, query, key, 16, 0.125),
            "selection, K=64": partial(_select, item),
        }
        times = time_in_turns(list(runs.values()), min(repeats, 5))
    rows = [[n, f"{t:.2f} ms", f"{t / times[0]:.2%}"] for n, t in zip(runs, times, strict=True)]
    title = "Against one call of LLaVA-1.5's vision tower, one image"
    return table(title, ["step", "time", "share of the tower's"], rows)


def _select(item: Candidates) -> list[KeptTokens]:
    return select_batch([item], AnchorParams())


def straightforward(item: Candidates) -> Tensor:
    """Select tokens as one would write the method down: a product and an argmax in each step."""
    assert item.relevance is not None
    params = AnchorParams()
    features, context = (F.normalize(x.float(), dim=-1) for x in (item.features, item.context))
    kept: list[int] = []
    for unit in anchored_units(item, params):
        order = (unit.start + item.relevance[unit.tokens].argsort(descending=True)).tolist()
        novel, end = 0, unit.minimum
        while end < unit.maximum and novel < params.patience:
            distance = (1 - features[order[: unit.minimum]] @ features[order[end]]).min()
            novel += int(distance > params.tau)
            end += 1
        kept += order[:end]
    taken = torch.zeros_like(item.importance, dtype=torch.bool)
    taken[kept] = True
    novelty = (1 - context @ context[kept].T).amin(1)
    while len(kept) < item.budget:
        score = (item.importance * novelty).masked_fill(taken, -torch.inf)
        kept.append(int(score.argmax()))
        taken[kept[-1]] = True
        novelty = novelty.minimum(1 - context @ context[kept[-1]])
    return torch.tensor(sorted(kept))


def authors_selector(repository: Path) -> Selector:
    """Load the selector of the paper's authors from a clone of MULTI-cau/AnchorPrune.

    It does not handle several units in one item.
    """
    path = repository / "anchorprune" / "selection.py"
    if not path.exists():
        raise ValueError(f"{path} is not there; give a clone of github.com/MULTI-cau/AnchorPrune")
    names = runpy.run_path(str(path))

    def of_the_authors(item: Candidates) -> Tensor:
        config = names["AnchorPruneConfig"](item.budget, min_anchor(item.budget))
        signals = (item.relevance, item.features, item.importance)
        kept: Tensor = names["anchorprune_select"](*signals, config, item.context_features)[0]
        return kept

    return of_the_authors

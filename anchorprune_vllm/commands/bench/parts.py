# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench parts`: what pruning costs, side by side in one run, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from anchorprune_vllm.commands.bench import attention, selection
from anchorprune_vllm.commands.bench.attention import TOWERS, measure_received_attention
from anchorprune_vllm.commands.bench.memory import measure_peak_memory
from anchorprune_vllm.commands.bench.selection import (
    SHAPES,
    Selector,
    Shape,
    authors_selector,
    measure_forms,
    measure_shapes,
    measure_steps,
)
from anchorprune_vllm.commands.bench.video import measure_videos

_LENGTHS = (576, 1024, 2048, 4096, 8192, 16384)


def run_parts(repeats: int, authors: Path | None = None, only: str | None = None) -> None:
    """Print all tables, each as soon as it is measured.

    authors: a clone of the paper's repository, whose selector is timed beside ours.
    only: the name of the one table to print.
    """
    console = Console()
    disable_progress_bar()  # of weights being loaded, between the tables
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    torch.manual_seed(0)
    others = [] if authors is None else [authors_selector(authors)]
    tables: dict[str, Callable[[int, torch.device], Table]] = {
        "selection": partial(_selection, others=others),
        "growth of selection": _selection_growth,
        "crops": _crops,
        "steps": _steps,
        "received attention": _received_attention,
        "received attention alone": _received_attention_alone,
        "videos": _videos,
        "peak memory": _peak_memory,
    }
    if only is not None and only not in tables:
        raise ValueError(f"{only!r} is not one of {', '.join(tables)}")
    for what, make_table in tables.items() if only is None else [(only, tables[only])]:
        with console.status(f"measuring: {what}"):
            table = make_table(repeats, device)
        table.title = f"{table.title} ({where})"
        console.print(table)


def _selection(repeats: int, device: torch.device, others: Sequence[Selector]) -> Table:
    columns = ["model", "N", "K", "ours", "straightforward loop", *(["the authors'"] * len(others))]
    table = _table(f"Selection of one image or video, median of {repeats}", *columns)
    for shape in SHAPES:
        able = others if shape.units == 1 else ()
        ours, *slower = measure_forms(shape, repeats, device, *able)
        table.add_row(
            *(shape.model, str(shape.tokens), str(shape.budget), f"{ours:.1f} ms"),
            *(_beside(each, ours, "ms", digits=1) for each in slower),
        )
    return table


def _selection_growth(repeats: int, device: torch.device) -> Table:
    table = _table(
        "Selection of one token in nine",
        *("N", "K", "time", "per N x K", "peak", "per token"),
    )
    for cost in selection.measure_growth(_LENGTHS, min(repeats, 3), device):
        table.add_row(
            *(str(cost.tokens), str(cost.budget), f"{cost.milliseconds:.1f} ms"),
            f"{1e6 * cost.milliseconds / cost.tokens / cost.budget:.1f} ns",
            f"{cost.mebibytes:.1f} MiB",
            f"{1024 * cost.mebibytes / cost.tokens:.1f} KiB",
        )
    return table


def _crops(repeats: int, device: torch.device) -> Table:
    table = _table(
        "One image with crops (5 x 576) against one without",
        *("share kept", "K of 576", "time", "K of 5 x 576", "time", "ratio"),
    )
    for budget in (32, 64, 128):
        shapes = (
            Shape("LLaVA-1.5", 576, 768, 1024, budget),
            Shape("LLaVA-NeXT", 2880, 768, 1024, 5 * budget, units=5),
        )
        one, five = measure_shapes(shapes, repeats, device)
        table.add_row(
            f"{budget / 576:.1%}",
            *(str(budget), f"{one:.1f} ms"),
            *(str(5 * budget), f"{five:.1f} ms"),
            f"{five / one:.1f}x",
        )
    return table


def _steps(repeats: int, device: torch.device) -> Table:
    title = "Against one call of LLaVA-1.5's vision tower, one image"
    table = _table(title, "step", "time", "share of the tower's")
    steps = measure_steps(min(repeats, 5), device)
    tower = next(iter(steps.values()))
    for step, spent in steps.items():
        table.add_row(step, f"{spent:.2f} ms", f"{spent / tower:.2%}")
    return table


def _received_attention(repeats: int, device: torch.device) -> Table:
    table = _table(
        "Received attention, and the towers it is taken from, with an eighth of their heads",
        *("tower", "tokens", "without", "with importance", "more of the real tower, computed"),
        *("peak without", "peak with importance"),
    )
    for tower in TOWERS:
        # Once: a picture of 16,384 tokens has 65,536 patches, and takes minutes on a CPU.
        for cost in measure_received_attention(tower, [32, 64, 128], repeats=1):
            table.add_row(
                *(cost.arch, str(cost.tokens), f"{cost.tower_ms:.0f} ms"),
                _beside(cost.with_importance_ms, cost.tower_ms, "ms"),
                f"{cost.share:.1%}",
                f"{cost.tower_mebibytes:.0f} MiB",
                _beside(cost.with_importance_mebibytes, cost.tower_mebibytes, "MiB"),
            )
    return table


def _received_attention_alone(repeats: int, device: torch.device) -> Table:
    table = _table(
        "Received attention alone", *("tokens", "time", "per pair of tokens", "peak", "per token")
    )
    for cost in attention.measure_growth(_LENGTHS, min(repeats, 3)):
        table.add_row(
            str(cost.tokens),
            f"{cost.milliseconds:.1f} ms",
            f"{1e6 * cost.milliseconds / cost.tokens**2:.2f} ns",
            f"{cost.mebibytes:.1f} MiB",
            f"{1024 * cost.mebibytes / cost.tokens:.2f} KiB",
        )
    return table


def _videos(repeats: int, device: torch.device) -> Table:
    table = _table(
        "One video through LLaVA-Video's tower, projector and, pruned, selection",
        *(
            "frames",
            "tokens",
            "unpruned",
            "K",
            "pruned",
            "unpruned, torch's peak",
            "pruned, torch's peak",
        ),
    )
    for cost in measure_videos([16, 64], 512, min(repeats, 2)):
        table.add_row(
            *(str(cost.frames), str(cost.tokens), f"{cost.unpruned_ms:.0f} ms", str(cost.kept)),
            _beside(cost.pruned_ms, cost.unpruned_ms, "ms"),
            f"{cost.unpruned_mebibytes:.0f} MiB",
            _beside(cost.pruned_mebibytes, cost.unpruned_mebibytes, "MiB"),
        )
    return table


def _peak_memory(repeats: int, device: torch.device) -> Table:
    table = _table(
        "Peak of torch's memory in one LLaVA-NeXT call, 7B widths",
        *("budget", "tokens", "peak above weights", "of the unpruned"),
    )
    unpruned, *pruned = measure_peak_memory(["100%", 640, 320, 160])
    for peak in (unpruned, *pruned):
        share = f"{peak.mebibytes / unpruned.mebibytes:.1%}"
        table.add_row(str(peak.budget), str(peak.tokens), f"{peak.mebibytes:.1f} MiB", share)
    return table


def _table(title: str, *columns: str) -> Table:
    """Words in the first column, numbers in the others."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _beside(value: float, other: float, unit: str, digits: int = 0) -> str:
    return f"{value:.{digits}f} {unit} ({value / other:.2f}x)"

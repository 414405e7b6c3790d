# SPDX-License-Identifier: Apache-2.0
"""The results of `bench serve` as `table.md`, `budget.png` and `concurrency.png`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anchorprune_vllm.commands.bench.contenders import FREE, UNPRUNED
from anchorprune_vllm.commands.bench.results import ServeResults

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Flops = Callable[[float], tuple[float | None, float]]
"""Maps the tokens of a prompt to the operations of the vision tower and of the prefill."""

_TTFT, _THROUGHPUT = "client.median_ttft_ms", "client.request_throughput"
_COLUMNS = {
    "tokens per request": ("prompt_tokens", "{:.0f}"),
    "first token, median (ms)": (_TTFT, "{:.0f}"),
    "p99": ("client.p99_ttft_ms", "{:.0f}"),
    "requests/s": (_THROUGHPUT, "{:.2f}"),
    "output tokens/s": ("client.output_throughput", "{:.1f}"),
    "requests that fit the KV cache": ("room", "{:.0f}"),
    "encoder (ms)": ("encoder_ms", "{:.0f}"),
    "selection (ms)": ("selection_ms", "{:.1f}"),
    "peak memory (GiB)": ("memory_gib", "{:.2f}"),
}
_SPEEDS = {"first token": _TTFT, "requests/s": _THROUGHPUT}


def check_plot() -> None:
    """Raise ValueError if plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("matplotlib is not installed; run: pip install '.[eval]'") from error


def write_report(
    results: ServeResults, out: Path, title: str, notes: Sequence[str], flops: Flops | None
) -> None:
    """Write the table and the plots."""
    (out / "table.md").write_text(as_markdown(results, title, notes, flops), encoding="utf-8")
    _plot_budgets(results, out / "budget.png")
    _plot_concurrencies(results, out / "concurrency.png")


def as_markdown(
    results: ServeResults, title: str, notes: Sequence[str], flops: Flops | None = None
) -> str:
    """Return a table for each concurrency, and one with the columns of the paper's."""
    parts = [f"# {title}", *(f"- {note}" for note in notes)]
    for concurrency in results.concurrencies():
        requests = "request" if concurrency == 1 else "requests"
        rounds = len({m.round for m in results.measurements if m.concurrency == concurrency})
        taken = f"median of {rounds} rounds" if rounds > 1 else "one round"
        parts += [f"\n## {concurrency} {requests} at once, {taken}\n", _table(results, concurrency)]
    parts += ["\n## As in the paper's efficiency table\n", _paper_table(results, flops)]
    return "\n".join(parts) + "\n"


def _table(results: ServeResults, concurrency: int) -> str:
    rows = []
    for contender in results.contenders():
        row = [contender.method, contender.budget or "all"]
        for figure, form in _COLUMNS.values():
            row.append(_written(results.median(contender, concurrency, figure), form))
        for figure in _SPEEDS.values():
            row.append(_written(results.speed_up(contender, concurrency, figure), "{:.2f}x"))
        for figure in _SPEEDS.values():
            share = None
            if contender.method not in (UNPRUNED, FREE):
                share = results.speed_up(contender, concurrency, figure, over=FREE)
            row.append(_written(share, "{:.1%}"))
        rows.append(row)
    head = ["method", "budget", *_COLUMNS, *(f"speed-up, {name}" for name in _SPEEDS)]
    return _markdown([*head, *(f"of free selection's, {name}" for name in _SPEEDS)], rows)


def _paper_table(results: ServeResults, flops: Flops | None) -> str:
    """Take the lowest concurrency: its time to first token is that of tower and prefill."""
    rows = []
    for contender in results.contenders():
        tokens, ttft, decode, memory = (
            results.median(contender, results.concurrencies()[0], figure)
            for figure in ("prompt_tokens", _TTFT, "client.median_tpot_ms", "memory_bytes")
        )
        tower, prefill = (None, None) if flops is None or tokens is None else flops(tokens)
        rows.append(
            [
                *(contender.method, contender.budget or "all"),
                *(_written(part and part / 1e12, "{:.3g}") for part in (prefill, tower)),
                *(_written(ttft, "{:.1f}"), _written(decode, "{:.1f}")),
                _written(memory and memory / 1e9, "{:.2f}"),
            ]
        )
    head = ["method", "budget", "FLOPs, prefill (T)", "FLOPs, vision tower (T)", "prefill (ms)"]
    return _markdown([*head, "decode (ms/token)", "memory (GB)"], rows)


def _written(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", "---", *["---:"] * (len(head) - 2)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def _plot_budgets(results: ServeResults, path: Path) -> None:
    """Plot time to first token and throughput against the tokens of a prompt."""
    at_once = results.concurrencies()
    drawing, panels = _drawing(["time to first token, median (ms)", "requests per second"])
    for axes, concurrency, figure in zip(
        panels, (at_once[0], at_once[-1]), (_TTFT, _THROUGHPUT), strict=True
    ):
        for method in dict.fromkeys(contender.method for contender in results.contenders()):
            # Every line ends at unpruned, which keeps the most tokens.
            line = [c for c in results.contenders() if c.method in (method, UNPRUNED)]
            tokens = [results.median(c, concurrency, "prompt_tokens") for c in line]
            values = [results.median(c, concurrency, figure) for c in line]
            style = {"color": "black", "zorder": 3} if method == UNPRUNED else {}
            _draw(axes, tokens, values, label=method, **style)
        axes.set_xscale("log")
        ticks = sorted({round(x) for line in axes.lines for x in np.ravel(line.get_xdata())})
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
        axes.set(title=f"{concurrency} at once", xlabel="prompt tokens per request")
    panels[0].legend()
    drawing.savefig(path, dpi=120)


def _plot_concurrencies(results: ServeResults, path: Path) -> None:
    """Plot throughput against concurrency."""
    at_once = results.concurrencies()
    drawing, (axes,) = _drawing(["requests per second"])
    for contender in results.contenders():
        values = [results.median(contender, each, _THROUGHPUT) for each in at_once]
        style = "--" if contender.method == FREE else "-"
        _draw(axes, at_once, values, label=str(contender), linestyle=style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(at_once, map(str, at_once))
    axes.set_xlabel("requests at once")
    axes.legend()
    drawing.savefig(path, dpi=120)


def _draw(axes: Axes, xs: Sequence[Any], ys: Sequence[float | None], **style: Any) -> None:
    """Draw a line through the points that were measured."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    if points:
        axes.plot(*zip(*sorted(points), strict=True), marker="o", **style)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _drawing(labels: Sequence[str]) -> tuple[Any, Sequence[Axes]]:
    """Return a drawing with a panel for each label of a y axis."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(5.5 * len(labels), 4), layout="constrained")
    panels = drawing.subplots(1, len(labels), squeeze=False)[0]
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label)
    return drawing, panels

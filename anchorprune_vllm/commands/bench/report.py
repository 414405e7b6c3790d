# SPDX-License-Identifier: Apache-2.0
"""Results of `anchorprune bench serve` as `table.md` and as plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anchorprune_vllm.commands.bench.contenders import FREE, UNPRUNED, Contender
from anchorprune_vllm.commands.bench.results import Figure, Measurement, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Flops = Callable[[float], tuple[float | None, float]]
"""Tokens of a prompt to operations of the vision tower and of the prefill."""

_COLUMNS: tuple[tuple[str, Figure, str], ...] = (
    ("tokens per request", lambda m: m.prompt_tokens, "{:.0f}"),
    ("first token, median (ms)", lambda m: m.ttft_ms, "{:.0f}"),
    ("p99", lambda m: m.client["p99_ttft_ms"], "{:.0f}"),
    ("requests/s", lambda m: m.requests_per_second, "{:.2f}"),
    ("output tokens/s", lambda m: m.client["output_throughput"], "{:.1f}"),
    ("requests that fit the KV cache", lambda m: m.room, "{:.0f}"),
    ("encoder (ms)", lambda m: m.encoder_ms, "{:.0f}"),
    ("selection (ms)", lambda m: m.selection_ms, "{:.1f}"),
    ("peak memory (GiB)", lambda m: m.memory_bytes / 2**30, "{:.2f}"),
)

_SPEEDS: tuple[tuple[str, Figure, bool], ...] = (
    ("first token", lambda m: m.ttft_ms, True),
    ("requests/s", lambda m: m.requests_per_second, False),
)


def check_plot() -> None:
    """Raise ValueError if plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "matplotlib is not installed; run: pip install 'anchorprune-vllm[eval]'"
        ) from error


def write_report(results: Results, title: str, notes: Sequence[str], flops: Flops | None) -> None:
    """table.md, budget.png and concurrency.png beside results.json."""
    directory = results.path.parent
    text = as_markdown(results, title, notes, flops)
    (directory / "table.md").write_text(text, encoding="utf-8")
    _plot_budgets(results, directory / "budget.png")
    _plot_concurrencies(results, directory / "concurrency.png")


def as_markdown(
    results: Results, title: str, notes: Sequence[str], flops: Flops | None = None
) -> str:
    """A table for each concurrency, and one with the columns of the paper's."""
    parts = [f"# {title}", *(f"- {note}" for note in notes)]
    for concurrency in results.concurrencies():
        requests = "request" if concurrency == 1 else "requests"
        rounds = len({m.round for m in results.measurements if m.concurrency == concurrency})
        taken = f"median of {rounds} rounds" if rounds > 1 else "one round"
        parts += [f"\n## {concurrency} {requests} at once, {taken}\n", _table(results, concurrency)]
    parts += ["\n## As in the paper's efficiency table\n", _paper_table(results, flops)]
    return "\n".join(parts) + "\n"


def _table(results: Results, concurrency: int) -> str:
    head = ["method", "budget", *(name for name, _, _ in _COLUMNS)]
    head += [f"speed-up, {name}" for name, _, _ in _SPEEDS]
    head += [f"of free selection's, {name}" for name, _, _ in _SPEEDS]
    rows = []
    for contender in results.contenders():
        figures = [
            _written(results.median(contender, concurrency, figure), form)
            for _, figure, form in _COLUMNS
        ]
        ups = [
            results.speed_up(contender, concurrency, figure, less_is_better=less)
            for _, figure, less in _SPEEDS
        ]
        shares = [
            results.of_free(contender, concurrency, figure, less_is_better=less)
            if contender.method not in (UNPRUNED, FREE)
            else None
            for _, figure, less in _SPEEDS
        ]
        row = [contender.method, contender.budget or "all", *figures]
        row += [_written(up, "{:.2f}x") for up in ups]
        rows.append([*row, *(_written(share, "{:.1%}") for share in shares)])
    return _markdown(head, rows)


def _paper_table(results: Results, flops: Flops | None) -> str:
    """At the lowest concurrency: a prefill is a time to first token, with tower and selection."""
    lowest = results.concurrencies()[0]
    head = ["method", "budget", "FLOPs, prefill (T)", "FLOPs, vision tower (T)", "prefill (ms)"]
    rows = []
    for contender in results.contenders():
        tokens = results.median(contender, lowest, lambda m: m.prompt_tokens)
        tower, prefill = (None, None) if flops is None or tokens is None else flops(tokens)
        memory = results.median(contender, lowest, lambda m: m.memory_bytes)
        rows.append(
            [
                *(contender.method, contender.budget or "all"),
                *(_written(part and part / 1e12, "{:.3g}") for part in (prefill, tower)),
                _written(results.median(contender, lowest, lambda m: m.ttft_ms), "{:.1f}"),
                _written(results.median(contender, lowest, _decode_ms), "{:.1f}"),
                _written(memory and memory / 1e9, "{:.2f}"),
            ]
        )
    return _markdown([*head, "decode (ms/token)", "memory (GB)"], rows)


def _decode_ms(measurement: Measurement) -> float:
    return float(measurement.client["median_tpot_ms"])


def _written(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", "---", *["---:"] * (len(head) - 2)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


# --- Plots ---


def _plot_budgets(results: Results, path: Path) -> None:
    """First token with one request at a time, throughput with most of them: against tokens."""
    low, high = results.concurrencies()[0], results.concurrencies()[-1]
    figure, (left, right) = _figure(2)
    for axes, concurrency, value in (
        (left, low, lambda m: m.ttft_ms),
        (right, high, lambda m: m.requests_per_second),
    ):
        _draw_methods(axes, results, concurrency, value)
        axes.set_title(f"{concurrency} at once")
        axes.set_xlabel("prompt tokens per request")
    left.set_ylabel("time to first token, median (ms)")
    right.set_ylabel("requests per second")
    left.legend()
    figure.savefig(path, dpi=120)


def _draw_methods(axes: Axes, results: Results, concurrency: int, value: Figure) -> None:
    methods = dict.fromkeys(contender.method for contender in results.contenders())
    for method in methods:
        points = sorted(
            (tokens, found)
            for contender in results.contenders()
            if contender.method in (method, UNPRUNED)  # where every line begins
            and (tokens := results.median(contender, concurrency, lambda m: m.prompt_tokens))
            and (found := results.median(contender, concurrency, value))
        )
        if points:
            on_top: dict[str, Any] = {"color": "black", "marker": "s", "zorder": 3}
            style = on_top if method == UNPRUNED else {"marker": "o"}
            axes.plot(*zip(*points, strict=True), label=method, **style)
    axes.set_xscale("log")
    ticks = sorted({round(tokens) for line in axes.lines for tokens in np.ravel(line.get_xdata())})
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _plot_concurrencies(results: Results, path: Path) -> None:
    figure, (axes,) = _figure(1)
    for contender in results.contenders():
        points = [
            (concurrency, found)
            for concurrency in results.concurrencies()
            if (found := results.median(contender, concurrency, lambda m: m.requests_per_second))
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", **_style(contender))
    axes.set_xscale("log", base=2)
    axes.set_xticks(results.concurrencies(), map(str, results.concurrencies()))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("requests per second")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _style(contender: Contender) -> dict[str, Any]:
    return {"label": str(contender), "linestyle": "--" if contender.method == FREE else "-"}


def _figure(columns: int) -> tuple[Any, Sequence[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(5.5 * columns, 4), layout="constrained")
    FigureCanvasAgg(drawing)
    return drawing, drawing.subplots(1, columns, squeeze=False)[0]

# SPDX-License-Identifier: Apache-2.0
"""The results of an evaluation as Markdown, as tables in the terminal, and as a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from anchorprune_vllm.budget import Budget
from anchorprune_vllm.commands.eval.plan import BLIND, FULL, Configuration
from anchorprune_vllm.commands.eval.results import EvalResults, Run
from anchorprune_vllm.commands.eval.scores import RESAMPLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NOTHING = "–"
_MARKERS = "osD^vP*X<>hp"


# -- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A table of the configurations that share positions and query, after their references."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sections(results: EvalResults, *, with_kinds: bool = True) -> list[Section]:
    """Return the results as tables of text; `with_kinds` adds columns for kinds of questions."""
    scores = [
        f"{data.name}: {column}" if len(results.data) > 1 else column
        for data in results.data
        for column in ("total", *_kinds(data.kind_of, with_kinds))
    ]
    header = ("budget", "method", *scores, "Rel.")
    done = {run.configuration for run in results.runs}
    references = [c for c in (Configuration(FULL), Configuration(BLIND)) if c in done]
    return [
        Section(
            _title(group),
            header,
            tuple(
                _row(results, configuration, with_kinds)
                for configuration in (*references, *sorted(group, key=_size))
            ),
        )
        for group in _groups(results)
    ]


def caption(results: EvalResults) -> str:
    """Return the text that says what the figures are."""
    sets = ", ".join(
        f"{data.name} ({len(data.questions)} questions about {len(data.pictures)} images)"
        for data in results.data
    )
    mean = ", mean over the data sets" if len(results.data) > 1 else ""
    text = (
        f"{sets}. Exact match in %; ± is half the width of the 95% interval (bootstrap over "
        f"images, {RESAMPLES} resamples). Rel. = accuracy / accuracy of {FULL} x 100{mean}. "
        f"{FULL}: unpruned."
    )
    if any(run.method == BLIND for run in results.runs):
        text += (
            f" {BLIND}: the training split's most frequent answer to each question, without the "
            "image."
        )
    return text


def markdown(results: EvalResults) -> str:
    """Return the contents of `table.md`."""
    parts = [f"# {results.settings['model']}", caption(results)]
    for section in sections(results):
        line = ["---", "---", *["---:"] * (len(section.header) - 2)]
        cells = [[cell.replace("|", "\\|") for cell in row] for row in section.rows]
        header = [cell.replace("|", "\\|") for cell in section.header]
        table = "\n".join(f"| {' | '.join(row)} |" for row in (header, line, *cells))
        parts += [f"## {section.title}", table]
    return "\n\n".join(parts) + "\n"


def rich_tables(results: EvalResults) -> list[Table]:
    """Return tables for the terminal; of several data sets only the totals, so that they fit."""
    tables = []
    for section in sections(results, with_kinds=len(results.data) == 1):
        table = Table(title=section.title)
        for number, name in enumerate(section.header):
            table.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
        for number, row in enumerate(section.rows):
            following = section.rows[number + 1 : number + 2]
            table.add_row(*row, end_section=any(each[0] != row[0] for each in following))
        tables.append(table)
    return tables


def _groups(results: EvalResults) -> list[list[Configuration]]:
    """Group pruned configurations by positions and query; without any, return an empty group."""
    found: dict[tuple[str | None, str | None], list[Configuration]] = {}
    for configuration in dict.fromkeys(run.configuration for run in results.runs):
        if configuration.budget is not None:
            group = found.setdefault((configuration.positions, configuration.query), [])
            group.append(configuration)
    return list(found.values()) or [[]]


def _size(configuration: Configuration) -> tuple[bool, Decimal | int]:
    """Order configurations by budget, first shares and then numbers of tokens."""
    budget = Budget.parse(configuration.budget)
    return budget.count is not None, budget.count or budget.percent or 0


def _title(group: Sequence[Configuration]) -> str:
    if not group:
        return "unpruned"
    positions = group[0].positions or "the model's own"
    return f"{positions} positions, query: {group[0].query}"


def _kinds(kind_of: Iterable[str], with_kinds: bool) -> list[str]:
    """Return the kinds of questions; a single one is left out, as it would repeat the total."""
    kinds = sorted({*kind_of})
    return kinds if with_kinds and len(kinds) > 1 else []


def _row(results: EvalResults, configuration: Configuration, with_kinds: bool) -> tuple[str, ...]:
    runs = {run.data: run for run in results.runs if run.configuration == configuration}
    cells = [configuration.budget or "", configuration.method]
    for data in results.data:
        kinds = _kinds(data.kind_of, with_kinds)
        if run := runs.get(data.name):
            low, high = run.interval
            cells.append(f"{100 * run.accuracy:.1f} ± {50 * (high - low):.1f}")
            cells += [f"{100 * run.kinds[kind]:.1f}" for kind in kinds]
        else:
            cells += [_NOTHING] * (1 + len(kinds))
    relative = results.relative(configuration)
    return (*cells, _NOTHING if relative is None else f"{relative:.1f}")


# -- the plot -------------------------------------------------------------------------------------


def plot(results: EvalResults, path: Path) -> None:
    """Plot accuracy against budget, a line for each method, a panel for each data set and group."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups, names = _groups(results), [data.name for data in results.data]
    methods = list(dict.fromkeys(each.method for group in groups for each in group))
    figure = Figure(figsize=(2.6 + 4.6 * len(groups), 3.8 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), len(groups), squeeze=False, sharey="row")
    for name, row in zip(names, panels, strict=True):
        runs = {run.configuration: run for run in results.runs if run.data == name}
        for group, axes in zip(groups, row, strict=True):
            _draw_references(axes, runs)
            _draw_lines(axes, [runs[each] for each in group if each in runs], methods)
            title = f"{name}\n{_title(group)}" if len(names) > 1 else _title(group)
            axes.set_title(title, fontsize="medium")
        row[0].set_ylabel("accuracy (%), 95% intervals")
    shown = [axes.get_legend_handles_labels() for axes in panels.flat]
    legend = {label: h for each in shown for h, label in zip(*each, strict=True)}
    figure.legend([*legend.values()], [*legend], loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_references(axes: Axes, runs: dict[Configuration, Run]) -> None:
    for method, style, colour in ((FULL, "-", "black"), (BLIND, "--", "gray")):
        if run := runs.get(Configuration(method)):
            low, high = run.interval
            axes.axhline(100 * run.accuracy, linestyle=style, color=colour, label=method)
            axes.axhspan(100 * low, 100 * high, color=colour, alpha=0.08, lw=0)


def _draw_lines(axes: Axes, runs: Sequence[Run], methods: Sequence[str]) -> None:
    """Draw a line for each method, which looks the same in all panels."""
    from matplotlib import colormaps

    label, place_of = _scale(runs)
    runs = sorted(runs, key=place_of)
    colours = colormaps["tab10" if len(methods) <= 10 else "tab20"]
    for number, method in enumerate(methods):
        line = [run for run in runs if run.method == method]
        if not line:
            continue
        aside = 1 + 0.012 * (number - (len(methods) - 1) / 2)  # so that intervals do not overlap
        # An interval of no width may be on the wrong side by rounding, hence max().
        below = [100 * max(0, run.accuracy - run.interval[0]) for run in line]
        above = [100 * max(0, run.interval[1] - run.accuracy) for run in line]
        axes.errorbar(
            [aside * place_of(run) for run in line],
            [100 * run.accuracy for run in line],
            yerr=[below, above],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
            color=colours(number % colours.N),
            label=method,
        )
    if runs:
        axes.set_xscale("log")
        ticks = {place_of(run): run.budget or "" for run in runs}
        axes.set_xticks([*ticks], [*ticks.values()])
        axes.set_xticks([], minor=True)
    axes.set_xlabel(label)
    axes.grid(axis="y", alpha=0.3)


def _scale(runs: Sequence[Run]) -> tuple[str, Callable[[Run], float]]:
    """Return the label of the axis of budgets, and the function that places a run on it."""
    budgets = {run.budget: Budget.parse(run.budget) for run in runs}
    if all(budget.percent is not None for budget in budgets.values()):
        return "visual tokens kept", lambda run: float(budgets[run.budget].percent or 0)
    if all(budget.count is not None for budget in budgets.values()):
        return "visual tokens kept", lambda run: float(budgets[run.budget].count or 0)
    # What shares and numbers of tokens have in common is how long the prompts became.
    return "budget, placed by mean prompt tokens", lambda run: run.prompt_tokens or 1

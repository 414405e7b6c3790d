# SPDX-License-Identifier: Apache-2.0
"""The results of an evaluation for people: Markdown, a table in the terminal, a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from anchorprune_vllm.budget import Budget
from anchorprune_vllm.commands.eval.plan import BLIND, FULL, Configuration
from anchorprune_vllm.commands.eval.results import Results, Run
from anchorprune_vllm.commands.eval.scores import RESAMPLES

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_NOTHING = "–"
_MARKERS = "osD^vP*X<>hp"


@dataclass(frozen=True)
class Section:
    """The rows that share positions and query; what they are compared with comes first."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sections(results: Results, *, with_kinds: bool = True) -> list[Section]:
    """The results as tables of text; `with_kinds`: a column for each kind of question too."""
    header = ("budget", "method", *_score_header(results, with_kinds), "Rel.")
    found = []
    for group in _groups(results):
        lines = [*_references(results), *_ordered(group)]
        rows = tuple(_row(results, configuration, with_kinds) for configuration in lines)
        found.append(Section(_title(group), header, rows))
    return found


def caption(results: Results) -> str:
    """What the figures are."""
    several = len(results.data) > 1
    relative = "accuracy / accuracy of Full x 100" + (", mean over the data sets" * several)
    blind = (
        f" {BLIND}: the training split's most frequent answer to each question, without the "
        "picture."
    )
    counts = ", ".join(
        f"{data.name} ({len(data.questions)} questions about {len(data.pictures)} pictures)"
        for data in results.data
    )
    return (
        f"{counts}. Exact match in %; ± is half the width of the 95% interval (bootstrap over "
        f"pictures, {RESAMPLES} resamples). Rel. = {relative}. {FULL}: unpruned."
        + blind
        * any(run.configuration.method == BLIND for run in results.runs)
    )


def markdown(results: Results) -> str:
    """The contents of `table.md`."""
    parts = [f"# {results.settings['model']}", caption(results)]
    for section in sections(results):
        text = ["---", "---"]
        lines = [section.header, text + ["---:"] * (len(section.header) - 2), *section.rows]
        table = "\n".join(f"| {' | '.join(_escaped(line))} |" for line in lines)
        parts += [f"## {section.title}", table]
    return "\n\n".join(parts) + "\n"


def rich_tables(results: Results) -> list[Table]:
    """The same for the terminal; of several data sets the totals alone, as wide as fits."""
    tables = []
    for section in sections(results, with_kinds=len(results.data) == 1):
        table = Table(title=section.title)
        for number, name in enumerate(section.header):
            table.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
        budget = None
        for row in section.rows:
            if budget is not None and row[0] != budget:
                table.add_section()
            budget = row[0]
            table.add_row(*row)
        tables.append(table)
    return tables


def check_plot() -> None:
    """Raise RuntimeError if no plot can be drawn: better known before hours of work."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            "matplotlib is not installed; run: pip install 'anchorprune-vllm[eval]'"
        ) from error


def plot(results: Results, path: Path) -> None:
    """Accuracy against budget: a line for each method, a panel for each data set and group."""
    check_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups, names = _groups(results), [data.name for data in results.data]
    # All panels give a method the same colour.
    methods = list(dict.fromkeys(c.method for group in groups for c in group))
    figure = Figure(figsize=(2.6 + 4.6 * len(groups), 3.8 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), len(groups), squeeze=False, sharey="row")
    for name, row in zip(names, panels, strict=True):
        for group, axes in zip(groups, row, strict=True):
            _draw_panel(axes, results, name, group, methods)
            title = [name] * (len(names) > 1) + [_title(group)]
            axes.set_title("\n".join(title), fontsize="medium")
        row[0].set_ylabel("accuracy (%), 95% intervals")
    found: dict[str, Artist] = {}
    for axes in panels.flat:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    figure.legend([*found.values()], [*found], loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_panel(
    axes: Axes, results: Results, name: str, group: Sequence[Configuration], methods: Sequence[str]
) -> None:
    from matplotlib import colormaps

    runs = {run.configuration: run for run in results.runs if run.data == name}
    for method, style, colour in ((FULL, "-", "black"), (BLIND, "--", "gray")):
        if run := runs.get(Configuration(method)):
            axes.axhline(100 * run.score.accuracy, linestyle=style, color=colour, label=method)
            axes.axhspan(100 * run.score.low, 100 * run.score.high, color=colour, alpha=0.08, lw=0)
    there = [runs[configuration] for configuration in group if configuration in runs]
    label, place_of = _scale(there)
    colours = colormaps["tab10" if len(methods) <= 10 else "tab20"]
    for number, method in enumerate(methods):
        line = sorted((r for r in there if r.configuration.method == method), key=place_of)
        if not line:
            continue
        # Beside each other, so that intervals do not hide one another.
        aside = 1 + 0.012 * (number - (len(methods) - 1) / 2)
        centre = [100 * run.score.accuracy for run in line]
        below = [100 * (run.score.accuracy - run.score.low) for run in line]
        above = [100 * (run.score.high - run.score.accuracy) for run in line]
        axes.errorbar(
            [aside * place_of(run) for run in line],
            centre,
            # Rounding may put an interval of no width on the wrong side.
            yerr=[[max(0, value) for value in side] for side in (below, above)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
            color=colours(number % colours.N),
            label=method,
        )
    if there:
        axes.set_xscale("log")
        ticks = {
            place_of(run): run.configuration.budget or "" for run in sorted(there, key=place_of)
        }
        axes.set_xticks([*ticks], [*ticks.values()])
        axes.set_xticks([], minor=True)
    axes.set_xlabel(label)
    axes.grid(axis="y", alpha=0.3)


def _scale(runs: Sequence[Run]) -> tuple[str, Callable[[Run], float]]:
    """The axis of budgets: its name, and where a run stands on it."""
    budgets = [_budget(run.configuration) for run in runs]
    if all(budget.percent is not None for budget in budgets):
        return "visual tokens kept", lambda run: float(_budget(run.configuration).percent or 0)
    if all(budget.count is not None for budget in budgets):
        return "visual tokens kept", lambda run: float(_budget(run.configuration).count or 0)
    # Shares and numbers of tokens can be compared by what came of them.
    return "budget, placed by mean prompt tokens", lambda run: run.prompt_tokens or 1


def _groups(results: Results) -> list[list[Configuration]]:
    """The pruned configurations by positions and query; one empty group if there are none."""
    found: dict[tuple[str | None, str | None], list[Configuration]] = {}
    for configuration in _pruned(results):
        found.setdefault((configuration.positions, configuration.query), []).append(configuration)
    return list(found.values()) or [[]]


def _pruned(results: Results) -> Iterable[Configuration]:
    configurations = dict.fromkeys(run.configuration for run in results.runs)
    return (c for c in configurations if c.budget is not None)


def _references(results: Results) -> list[Configuration]:
    there = {run.configuration for run in results.runs}
    return [c for c in (Configuration(FULL), Configuration(BLIND)) if c in there]


def _ordered(group: Iterable[Configuration]) -> list[Configuration]:
    """By budget: shares, then numbers of tokens; methods as they were given."""

    def size(configuration: Configuration) -> tuple[bool, Decimal | int]:
        budget = _budget(configuration)
        return budget.count is not None, budget.count or budget.percent or 0

    return sorted(group, key=size)


def _budget(configuration: Configuration) -> Budget:
    return Budget.parse(configuration.budget)


def _title(group: Sequence[Configuration]) -> str:
    if not group:
        return "unpruned"
    positions = group[0].positions or "the model's own"
    return f"{positions} positions, query: {group[0].query}"


def _score_header(results: Results, with_kinds: bool) -> list[str]:
    """For each data set the total, then its kinds of questions."""
    several = len(results.data) > 1
    header = []
    for data in results.data:
        prefix = f"{data.name}: " if several else ""
        header.append(f"{prefix}total")
        if with_kinds:
            header += [f"{prefix}{kind}" for kind in _kinds(data.kind_of)]
    return header


def _kinds(kind_of: Iterable[str]) -> list[str]:
    """None if there is but one: it would repeat the total."""
    kinds = sorted({*kind_of})
    return kinds if len(kinds) > 1 else []


def _row(results: Results, configuration: Configuration, with_kinds: bool) -> tuple[str, ...]:
    runs = {run.data: run for run in results.runs if run.configuration == configuration}
    cells = [configuration.budget or "", configuration.method]
    for data in results.data:
        kinds = _kinds(data.kind_of) if with_kinds else []
        if run := runs.get(data.name):
            half = (run.score.high - run.score.low) / 2
            cells.append(f"{100 * run.score.accuracy:.1f} ± {100 * half:.1f}")
            cells += [f"{100 * run.score.kinds[kind]:.1f}" for kind in kinds]
        else:
            cells += [_NOTHING] * (1 + len(kinds))
    relative = results.relative(configuration)
    return (*cells, _NOTHING if relative is None else f"{relative:.1f}")


def _escaped(cells: Iterable[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]

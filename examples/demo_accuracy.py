# SPDX-License-Identifier: Apache-2.0
"""Measure the demo's two trained models and write docs/accuracy.md, its plots and its pictures.

    pip install 'anchorprune-vllm[eval]'
    python examples/demo_accuracy.py

All methods, and AnchorPrune's own stages, at three budgets on three sets; then how often the anchor
lies on what was asked. Takes about an hour on two cores. Whatever is measured is kept in --out, and
the same command goes on where it was stopped. The page's figures stand between marks, and only what
is between them is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anchorprune_vllm.tools.chosen_methods import Method, parse_methods
from anchorprune_vllm.tools.demo_model import TRAINED, make_trained_model
from anchorprune_vllm.tools.eval import Evaluation, run_eval
from anchorprune_vllm.tools.eval_data import load_data
from anchorprune_vllm.tools.eval_plan import BLIND, FULL, PERFECT, Configuration
from anchorprune_vllm.tools.eval_results import Results
from anchorprune_vllm.tools.explain.run import Wanted, run_explain

DOCS = Path(__file__).parents[1] / "docs"
SETS = ("clutter", "scenes", "easy-vqa")
BUDGETS = ("5.6%", "11.1%", "22.2%")
STAGE_1 = {"max_anchor_ratio": 1, "min_anchor": 256}
"""Of which the anchor takes the whole budget."""
OTHER_SETTINGS = {
    "llava-1.5": ("the paper's sign", "similarity=negated"),
    "qwen2.5-vl": ("mean over words", "matching=mean"),
}
"""What each model may be set to instead, and what that is called."""


@dataclass(frozen=True)
class Row:
    """A line of the tables: what it is called, and what it is."""

    title: str
    method: str
    query: str | None = "turn"

    def at(self, budget: str) -> Configuration:
        if self.method in (FULL, BLIND):
            return Configuration(self.method)
        return Configuration(self.method, None, self.query, budget)


def rows_of(arch: str) -> list[Row]:
    """Return all that is measured of a model; every method that looks at the question, as set."""
    ours = _set(arch, "anchorprune")
    other, option = OTHER_SETTINGS[arch]
    (elsewise,) = parse_methods([f"anchorprune:{option}"])
    stage_1 = Method("anchorprune", tuple(sorted({**dict(ours.options), **STAGE_1}.items())))
    published = [_set(arch, name.name) for name in parse_methods(["all"])[1:]]
    return [
        Row("unpruned", FULL),
        Row("without the image", BLIND),
        Row("**AnchorPrune**", str(ours)),
        Row("… Stage 1 alone", str(stage_1)),
        Row("… Stage 2 alone", str(ours), "none"),
        Row(f"… {other}", str(elsewise)),
        *(Row(method.name, str(method)) for method in published),
        Row("*perfect relevance*", PERFECT),
    ]


def _set(arch: str, name: str) -> Method:
    return Method(name).with_defaults(TRAINED[arch])


def measure(arch: str, out: Path, limit: int) -> Results:
    """Put the questions to the engine: what is there already is not asked again."""
    model = out / f"trained-{arch}"
    make_trained_model(model, arch)
    rows = rows_of(arch)

    def evaluate(query: str, ceiling: bool = False) -> Results:
        asked = [row.method for row in rows if row.query == query]
        named = [method for method in asked if method not in (FULL, BLIND, PERFECT)]
        return run_eval(
            Evaluation(
                model=str(model),
                out=out / arch,
                data=SETS,
                methods=parse_methods(named),
                budgets=BUDGETS,
                scopes=(query,),
                limit=limit,
                max_tokens=4,
                ceiling=ceiling,
                command="python examples/demo_accuracy.py",
            )
        )

    evaluate("none")
    return evaluate("turn", ceiling=True)


def measure_anchors(out: Path, scenes: int) -> dict[str, dict[str, list[int]]]:
    """Return, by model and settings, then by kind of question, hits and questions."""
    from anchorprune_vllm.tools.asked_thing import anchor_hits
    from anchorprune_vllm.tools.local_model import one_rank

    kept = out / f"anchors-{scenes}.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    (data,) = load_data(["clutter"], None)
    for arch in TRAINED:
        for method in (_set(arch, "anchorprune"), parse_methods([_other(arch)])[0]):
            name = f"{arch}, {method}"
            if name in found:
                continue
            print(f"anchors of {name}: {scenes} scenes")
            with tempfile.TemporaryDirectory() as scratch, one_rank(Path(scratch)):
                hits = anchor_hits(
                    out / f"trained-{arch}", data.pictures[:scenes], method.settings(), BUDGETS[0]
                )
            found[name] = {kind: [sum(each), len(each)] for kind, each in sorted(hits.items())}
            kept.write_text(json.dumps(found, indent=2))
    return found


def _other(arch: str) -> str:
    return f"anchorprune:{OTHER_SETTINGS[arch][1]}"


# -- tables ---------------------------------------------------------------------------------------


def accuracy_table(arch: str, results: Results) -> str:
    """Draw accuracy and interval of each row, set and budget; the best of each column is bold."""
    header = ["", *(f"{name} {budget}" for name in SETS for budget in BUDGETS)]
    runs = {(run.configuration, run.data): run.score for run in results.runs}
    lines = []
    for row in rows_of(arch):
        cells = []
        for name in SETS:
            for budget in BUDGETS:
                score = runs.get((row.at(budget), name))
                cells.append(_accuracy(score) if score else "–")
        lines.append([row.title, *cells])
    return _markdown(header, lines)


def kinds_table(arch: str, results: Results) -> str:
    """Draw accuracy by kind of question, on cluttered scenes at the smallest budget."""
    runs = {run.configuration: run.score for run in results.runs if run.data == SETS[0]}
    rows = [(row, runs.get(row.at(BUDGETS[0]))) for row in rows_of(arch)]
    kinds = sorted(next(score for _, score in rows if score).kinds)
    lines = [
        [row.title, *(f"{100 * score.kinds[kind]:.1f}" for kind in kinds)]
        for row, score in rows
        if score
    ]
    return _markdown(["", *kinds], lines)


def anchors_table(anchors: dict[str, dict[str, list[int]]]) -> str:
    """Draw in how many percent of the questions the anchor has a token on the asked thing."""
    kinds = sorted(next(iter(anchors.values())))
    lines = []
    for name, found in anchors.items():
        hits, asked = (sum(found[kind][place] for kind in kinds) for place in (0, 1))
        cells = [_share(*found[kind]) for kind in kinds]
        lines.append([f"`{name}`", *cells, _share(hits, asked)])
    return _markdown(["", *kinds, "all"], lines)


def _share(hits: int, asked: int) -> str:
    share = hits / asked
    return f"{100 * share:.1f} ± {196 * np.sqrt(share * (1 - share) / asked):.1f}"


def _accuracy(score: Any) -> str:
    return f"{100 * score.accuracy:.1f} ± {50 * (score.high - score.low):.1f}"


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def summary_table(results: dict[str, Results]) -> str:
    """Draw cluttered scenes alone, one table for both models; a row is named by its method."""
    header = ["", *(f"{arch}, {budget}" for arch in results for budget in BUDGETS)]
    cells: dict[str, list[str]] = {}
    for arch, found in results.items():
        runs = {run.configuration: run.score for run in found.runs if run.data == SETS[0]}
        for row in rows_of(arch):
            if not row.title.startswith("…"):
                scores = (runs.get(row.at(budget)) for budget in BUDGETS)
                written = [_accuracy(score) if score else "–" for score in scores]
                cells.setdefault(row.title, []).extend(written)
    return _markdown(header, [[title, *written] for title, written in cells.items()])


# -- pictures -------------------------------------------------------------------------------------


def plot(results: dict[str, Results], path: Path) -> None:
    """Draw accuracy on cluttered scenes against the budget, a panel for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), sharey=True)
    places = [float(budget.rstrip("%")) for budget in BUDGETS]
    for axes, (arch, found) in zip(panels, results.items(), strict=True):
        runs = {run.configuration: run.score for run in found.runs if run.data == SETS[0]}
        for row in rows_of(arch):
            scores = [runs[row.at(budget)] for budget in BUDGETS]
            is_ours = row.method == rows_of(arch)[2].method and row.query == "turn"
            is_reference = row.method in (FULL, BLIND, PERFECT)
            axes.errorbar(
                places,
                [100 * score.accuracy for score in scores],
                yerr=[
                    [100 * max(0, score.accuracy - score.low) for score in scores],
                    [100 * max(0, score.high - score.accuracy) for score in scores],
                ],
                label=row.title.strip("*"),
                linewidth=3 if is_ours else 1.2,
                linestyle="--" if is_reference else "-",
                color="tab:orange" if is_ours else None,
                capsize=2,
            )
        axes.set_xscale("log")
        axes.set_xticks(places, BUDGETS)
        axes.set_xticks([], minor=True)
        axes.set_title(f"{arch}: cluttered scenes")
        axes.set_xlabel("visual tokens kept")
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("right answers (%), 95% intervals")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)


def draw_examples(out: Path, results: Results) -> str:
    """Draw the first test scene, and the first one that pruning gets wrong; return the text."""
    arch = "llava-1.5"
    ours = rows_of(arch)[2]
    right = {
        run.configuration: run.right
        for run in results.runs
        if run.data == SETS[0] and run.configuration in (ours.at(BUDGETS[0]), Configuration(FULL))
    }
    (data,) = load_data([SETS[0]], results.settings["limit"])
    lost = [
        number
        for number, (pruned, whole) in enumerate(
            zip(right[ours.at(BUDGETS[0])], right[Configuration(FULL)], strict=True)
        )
        if whole and not pruned and data.questions[number].about
    ]
    texts = [
        "The first test scene and its first question, with AnchorPrune, DivPrune and VisionZip at "
        "5.6% (`anchorprune explain`'s own default):"
    ]
    first = next(each for each in data.pictures[0].questions if each.kind != "yes/no")
    drawn = [("explain.png", 0, first.text)]
    if lost:
        number = lost[0]
        drawn.append(("explain-wrong.png", data.picture_of[number], data.questions[number].text))
        texts.append(
            "A bad case: the first question, in the order of the set, that is answered rightly "
            "unpruned and wrongly with AnchorPrune:"
        )
    parts = []
    for text, (name, scene, question) in zip(texts, drawn, strict=True):
        run_explain(
            Wanted(
                model=str(out / f"trained-{arch}"),
                media=f"clutter:{scene}",
                question=question,
                budgets=["5.6%"],
                methods=[_set(arch, name) for name in ("anchorprune", "divprune", "visionzip")],
                out=DOCS / name,
            )
        )
        parts.append(f"{text}\n\n![{question}]({name})")
    return "\n\n".join(parts)


def fill(page: Path, blocks: dict[str, str]) -> None:
    """Replace what stands between the marks `<!-- NAME -->` and `<!-- end of NAME -->`."""
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        marks = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        text, count = re.subn(marks, lambda m, b=block: f"{m[1]}{b}\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{page} has {count} places for {name}, not one")
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("accuracy-results"))
    parser.add_argument("--limit", type=int, default=1000, help="questions of each set")
    parser.add_argument("--scenes", type=int, default=1000, help="on which anchors are looked at")
    parser.add_argument("--arch", choices=TRAINED, help="measure this one alone, write no page")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.arch:
        measure(args.arch, args.out, args.limit)
        return
    results = {arch: measure(arch, args.out, args.limit) for arch in TRAINED}
    anchors = measure_anchors(args.out, args.scenes)
    blocks = {"anchors": anchors_table(anchors)}
    for arch, found in results.items():
        blocks[f"accuracy of {arch}"] = accuracy_table(arch, found)
        blocks[f"kinds of {arch}"] = kinds_table(arch, found)
    blocks["examples"] = draw_examples(args.out, results["llava-1.5"])
    plot(results, DOCS / "accuracy.png")
    fill(DOCS / "accuracy.md", blocks)
    fill(DOCS.parent / "README.md", {"summary": summary_table(results)})


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Measure the demo's two trained models, and write the tables and images of docs/accuracy.md.

    pip install '.[eval]'
    python examples/demo_accuracy.py

It runs all methods, and AnchorPrune's stages alone, at three budgets on three sets, and then counts
how often the anchor lies on what was asked: about an hour on two cores. What is measured is kept in
--out, so the same command goes on where it was stopped. Tables stand between marks in the page and
in README.md, and nothing else in them is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands.chosen_methods import ChosenMethod, parse_methods
from anchorprune_vllm.commands.eval.data import load_data
from anchorprune_vllm.commands.eval.plan import BLIND, FULL, PERFECT, Configuration
from anchorprune_vllm.commands.eval.results import EvalResults, Run
from anchorprune_vllm.commands.eval.run import Evaluation, run_eval
from anchorprune_vllm.commands.eval.vqa_data import Picture
from anchorprune_vllm.commands.explain.run import DEMO, ExplainSettings, run_explain
from anchorprune_vllm.testing.demo_models.make import TRAINED, make_trained_model

DOCS = Path(__file__).parents[1] / "docs"
SETS = ("clutter", "scenes", "easy-vqa")
BUDGETS = ("5.6%", "11.1%", "22.2%")
STAGE_1 = {"max_anchor_ratio": 1, "min_anchor": 256}
"""Settings with which the anchor takes the whole budget."""
PAPER_SETTINGS = {
    "llava-1.5": "similarity=negated",
    "qwen2.5-vl": "matching=max",
}
"""The paper's own setting of AnchorPrune for each model, where it is served with another."""
IN_SUMMARY = (
    *("unpruned", "without the image", "**AnchorPrune**", "… the paper's setting"),
    *("divprune", "cdpruner", "random"),
)
"""Rows of the README's table; docs/accuracy.md has them all."""


@dataclass(frozen=True)
class Row:
    """A line of the tables: its title, and what is run for it."""

    title: str
    method: str
    query: str | None = "turn"

    def at(self, budget: str) -> Configuration:
        if self.method in (FULL, BLIND):
            return Configuration(self.method)
        return Configuration(self.method, None, self.query, budget)


def ours(arch: str) -> Row:
    """Return the line of AnchorPrune itself."""
    return Row("**AnchorPrune**", str(_set(arch, "anchorprune")))


def rows_of(arch: str) -> list[Row]:
    """Return all that is measured of a model; its settings go to what looks at the question."""
    anchorprune, *published = (_set(arch, method.name) for method in parse_methods(["all"]))
    stage_1 = ChosenMethod(
        "anchorprune", tuple(sorted({**dict(anchorprune.options), **STAGE_1}.items()))
    )
    return [
        Row("unpruned", FULL),
        Row("without the image", BLIND),
        ours(arch),
        Row("… Stage 1 alone", str(stage_1)),
        Row("… Stage 2 alone", str(anchorprune), "none"),
        Row("… the paper's setting", str(_set_as_in_the_paper(arch))),
        *(Row(method.name, str(method)) for method in published),
        Row("*perfect relevance*", PERFECT),
    ]


def _set(arch: str, name: str) -> ChosenMethod:
    return ChosenMethod(name).with_defaults(TRAINED[arch])


def _set_as_in_the_paper(arch: str) -> ChosenMethod:
    return parse_methods([f"anchorprune:{PAPER_SETTINGS[arch]}"])[0]


def measure(arch: str, out: Path, limit: int) -> EvalResults:
    """Put the questions to the engine, but for those whose answers are in --out already."""
    model = out / f"trained-{arch}"
    make_trained_model(model, arch)
    rows = rows_of(arch)

    def evaluate(query: str, ceiling: bool = False) -> EvalResults:
        asked = [row.method for row in rows if row.query == query]
        named = [method for method in asked if method not in (FULL, BLIND, PERFECT)]
        return run_eval(
            Evaluation(
                model=str(model),
                out=out / arch,
                data=SETS,
                methods=parse_methods(named),
                budgets=BUDGETS,
                query=(query,),
                limit=limit,
                max_tokens=4,
                ceiling=ceiling,
                command="python examples/demo_accuracy.py",
            )
        )

    evaluate("none")
    return evaluate("turn", ceiling=True)


def measure_anchors(out: Path, scenes: int) -> dict[str, dict[str, list[int]]]:
    """Return the numbers of hits and of questions, by model and settings, and then by kind."""
    from anchorprune_vllm.testing.local_model import one_rank

    kept = out / f"anchors-{scenes}.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    (data,) = load_data(["clutter"], None)
    for arch in TRAINED:
        for method in (_set(arch, "anchorprune"), _set_as_in_the_paper(arch)):
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


def anchor_hits(
    model: Path, pictures: Sequence[Picture], settings: Mapping[str, Any], budget: str
) -> dict[str, list[bool]]:
    """Return, by kind of question, whether the anchor has a token on the thing that is named.

    The model's processor, tower and selection run in this process, which has to be in `one_rank`.
    """
    from anchorprune_vllm.commands.eval.asked_thing import tokens_on
    from anchorprune_vllm.testing.local_model import LocalModel
    from anchorprune_vllm.testing.selections import recorded_selections

    local = LocalModel(model, settings=dict(settings))
    tokenizer = local.processor.info.get_tokenizer()
    hits: dict[str, list[bool]] = defaultdict(list)
    for picture in pictures:
        image = picture.load()
        for question in filter(lambda question: question.about, picture.questions):
            content = [{"type": "image"}, {"type": "text", "text": question.text}]
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            with recorded_selections(local.model._pruner) as record:
                local.embed(local.process(prompt, image, budget=budget))
            ((item, kept),) = record
            on_thing = tokens_on(question.about[:1], item.grids[0])
            hits[question.kind].append(bool(on_thing[kept.indices[kept.is_anchor]].any()))
    return dict(hits)


# -- tables ---------------------------------------------------------------------------------------


def accuracy_table(arch: str, results: EvalResults) -> str:
    """Draw accuracy and interval of each row on each set, at each budget."""
    header = ["", *(f"{name} {budget}" for name in SETS for budget in BUDGETS)]
    runs = [_runs(results, name) for name in SETS]
    lines = [
        [row.title, *(cell for of_set in runs for cell in _accuracies(of_set, row))]
        for row in rows_of(arch)
    ]
    return _markdown(header, lines)


def kinds_table(arch: str, results: EvalResults) -> str:
    """Draw accuracy by kind of question, on cluttered scenes at the smallest budget."""
    runs = _runs(results, SETS[0])
    rows = [(row, runs.get(row.at(BUDGETS[0]))) for row in rows_of(arch)]
    kinds = sorted(next(run for _, run in rows if run).kinds)
    lines = [
        [row.title, *(f"{100 * run.kinds[kind]:.1f}" for kind in kinds)] for row, run in rows if run
    ]
    return _markdown(["", *kinds], lines)


def sizes(limit: int) -> str:
    """Say how many questions the tables have."""
    return "\n".join(
        f"- {data.name}: {len(data.questions):,} questions about {len(data.pictures):,} images"
        for data in load_data(SETS, limit)
    )


def anchors_table(anchors: dict[str, dict[str, list[int]]]) -> str:
    """Draw the share of the questions for which the anchor has a token on the thing named."""
    kinds = sorted(next(iter(anchors.values())))
    lines = []
    for name, found in anchors.items():
        hits, asked = (sum(found[kind][place] for kind in kinds) for place in (0, 1))
        cells = [_share(*found[kind]) for kind in kinds]
        lines.append([f"`{name}`", *cells, _share(hits, asked)])
    return _markdown(["", *kinds, "all"], lines)


def _share(hits: int, asked: int) -> str:
    return f"{100 * hits / asked:.1f}"


def _runs(results: EvalResults, data: str) -> dict[Configuration, Run]:
    return {run.configuration: run for run in results.runs if run.data == data}


def _accuracies(runs: Mapping[Configuration, Run], row: Row) -> list[str]:
    """Return a row's cells, one for each budget."""
    found = [runs.get(row.at(budget)) for budget in BUDGETS]
    return [
        f"{100 * run.accuracy:.1f} ± {50 * (run.interval[1] - run.interval[0]):.1f}" if run else "–"
        for run in found
    ]


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def summary_table(results: dict[str, EvalResults]) -> str:
    """Draw the rows of the README on cluttered scenes, one table for both models."""
    header = ["", *(f"{arch}, {budget}" for arch in results for budget in BUDGETS)]
    cells: dict[str, list[str]] = {}
    for arch, found in results.items():
        runs = _runs(found, SETS[0])
        for row in rows_of(arch):
            if row.title in IN_SUMMARY:
                cells.setdefault(row.title, []).extend(_accuracies(runs, row))
    return _markdown(header, [[title, *written] for title, written in cells.items()])


# -- images ---------------------------------------------------------------------------------------


def plot(results: dict[str, EvalResults], path: Path) -> None:
    """Draw accuracy on cluttered scenes against the budget, a panel for each model."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), sharey=True)
    places = [float(budget.rstrip("%")) for budget in BUDGETS]
    for axes, (arch, found) in zip(panels, results.items(), strict=True):
        run_of = _runs(found, SETS[0])
        for number, row in enumerate(rows_of(arch)):
            runs = [run_of[row.at(budget)] for budget in BUDGETS]
            is_ours = row == ours(arch)
            is_reference = row.method in (FULL, BLIND, PERFECT)
            axes.errorbar(
                places,
                [100 * run.accuracy for run in runs],
                yerr=[
                    [100 * max(0, run.accuracy - run.interval[0]) for run in runs],
                    [100 * max(0, run.interval[1] - run.accuracy) for run in runs],
                ],
                label=row.title.strip("*"),
                linewidth=3 if is_ours else 1.2,
                linestyle="--" if is_reference else "-",
                color="black" if is_ours else colormaps["tab20"](number),
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


def draw_examples(results: EvalResults) -> str:
    """Draw the first test scene, and the first one that pruning gets wrong; return the text."""
    right = {run.configuration: run.right for run in results.runs if run.data == SETS[0]}
    unpruned, pruned = right[Configuration(FULL)], right[ours("llava-1.5").at(BUDGETS[0])]
    (data,) = load_data([SETS[0]], results.settings["limit"])
    lost = [
        number
        for number, question in enumerate(data.questions)
        if unpruned[number] and not pruned[number] and question.about
    ]
    texts = [
        "The first test scene and its first open question "
        "(`anchorprune explain --methods anchorprune divprune visionzip --budgets 5.6%`):"
    ]
    first = next(each for each in data.pictures[0].questions if each.kind != "yes/no")
    drawn = [("explain.png", 0, first.text)]
    if lost:
        number = lost[0]
        drawn.append(("explain-wrong.png", data.picture_of[number], data.questions[number].text))
        texts.append(
            "A bad case, the first in the order of the set: the answer is right unpruned, and "
            "wrong with AnchorPrune:"
        )
    parts = []
    for text, (file, scene, question) in zip(texts, drawn, strict=True):
        run_explain(
            ExplainSettings(
                model=DEMO,
                media=f"clutter:{scene}",
                question=question,
                budgets=BUDGETS[:1],
                methods=parse_methods(["anchorprune", "divprune", "visionzip"]),
                out=DOCS / file,
            )
        )
        parts.append(f"{text}\n\n![{question}]({file})")
    return "\n\n".join(parts)


def fill(page: Path, blocks: dict[str, str]) -> None:
    """Replace what stands between the lines `<!-- NAME -->` and `<!-- end of NAME -->`.

    Raises ValueError, and writes nothing, unless each of them is there once, in this order.
    """
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(start)
        _, found, after = rest.partition(end)
        if not found or (text.count(start), text.count(end)) != (1, 1):
            raise ValueError(f"{page}: give {start.strip()} and {end.strip()} a line each, once")
        text = f"{before}{start}{block}\n{end}{after}"
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
    blocks = {"sizes": sizes(args.limit), "anchors": anchors_table(anchors)}
    for arch, found in results.items():
        blocks[f"accuracy of {arch}"] = accuracy_table(arch, found)
        blocks[f"kinds of {arch}"] = kinds_table(arch, found)
    blocks["examples"] = draw_examples(results["llava-1.5"])
    plot(results, DOCS / "accuracy.png")
    fill(DOCS / "accuracy.md", blocks)
    fill(DOCS.parent / "README.md", {"summary": summary_table(results)})


if __name__ == "__main__":
    main()

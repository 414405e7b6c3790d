# SPDX-License-Identifier: Apache-2.0
"""A Markdown table of what examples/eval_lmms.sh has measured, beside the paper's own figures.

    python examples/lmms_table.py OUT [--paper llava-1.5]

Rows are budgets and methods, columns the paper's benchmarks and Rel., the mean over the columns of
score / score of the unpruned model x 100. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

PAPER = Path(__file__).with_name("paper_tables.json")
FULL = "full"


@dataclass(frozen=True)
class Score:
    """Where a column's figure is in lmms-eval's results of a task."""

    column: str
    metric: str
    scale: float = 1
    """lmms-eval gives some as shares and some in percent; the paper has percent."""


SCORES = {
    "vqav2_val": Score("VQAv2", "exact_match,none", 100),
    "textvqa_val": Score("TextVQA", "exact_match,none", 100),
    "textvqa_val_ocr": Score("TextVQA", "exact_match,none", 100),
    "gqa": Score("GQA", "exact_match,none", 100),
    "scienceqa_img": Score("ScienceQA-IMG", "exact_match,none", 100),
    "mme": Score("MME", "mme_perception_score,none"),
    "pope": Score("POPE", "pope_f1_score,none", 100),
    "mmbench_en_dev": Score("MMBench-EN", "gpt_eval_score,none"),
    "mmbench_cn_dev": Score("MMBench-CN", "gpt_eval_score,none"),
    "mmvet": Score("MM-Vet", "gpt_eval_score,none"),
    "docvqa_val": Score("DocVQA", "anls,none", 100),
    "ai2d": Score("AI2D", "exact_match,flexible-extract", 100),
    "mmmu_val": Score("MMMU", "mmmu_acc,none", 100),
    "videomme": Score("Video-MME w/o subtitles", "videomme_perception_score,none"),
    "videomme_w_subtitle": Score("Video-MME w/ subtitles", "videomme_perception_score,none"),
    "egoschema_subset": Score("EgoSchema", "score,none", 100),
    "tempcompass_multi_choice": Score("TempCompass", "avg_accuracy,none"),
    "tempcompass_yes_no": Score("TempCompass", "avg_accuracy,none"),
    "tempcompass_caption_matching": Score("TempCompass", "avg_accuracy,none"),
    "tempcompass_captioning": Score("TempCompass", "avg_accuracy,none"),
    "easy_vqa": Score("easy-vqa", "exact_match,none", 100),
}
TASKS_OF = {"TempCompass": 4}
"""Columns that are the mean of several tasks, all of which must be there."""


@dataclass
class Run:
    """Results of one method at one budget, or of the unpruned model."""

    scores: dict[str, float] = field(default_factory=dict)
    """By task, in the paper's scale."""
    questions: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By task: how many were asked, and how many there are."""
    prompt_tokens: dict[str, list[int]] = field(default_factory=dict)
    """By task: of each question."""

    def columns(self) -> dict[str, float]:
        parts: dict[str, dict[str, float]] = {}
        for task, score in self.scores.items():
            parts.setdefault(SCORES[task].column, {})[task] = score
        for column, found in parts.items():
            if len(found) > TASKS_OF.get(column, 1):
                raise ValueError(f"{' and '.join(found)} are both {column}: remove one of them")
        return {
            column: fmean(found.values())
            for column, found in parts.items()
            if len(found) == TASKS_OF.get(column, 1)
        }


def relative(scores: Mapping[str, float], full: Mapping[str, float]) -> float | None:
    """The paper's Rel., over the columns of `full`; None if there is none."""
    if not full or full.keys() - scores.keys() or not all(full.values()):
        return None
    return fmean(scores[column] / full[column] for column in full) * 100


def read_runs(out: Path) -> dict[str, Run]:
    """lmms-eval's newest results of each task, by the name of the run's folder."""
    runs: dict[str, Run] = {}
    # Their names begin with the date. Folders that begin with a dot are unfinished.
    found = out.glob("*/[!.]*/**/*_results.json")
    for path in sorted(found, key=lambda path: (path.name, path)):
        run = runs.setdefault(path.relative_to(out).parts[0], Run())
        content = json.loads(path.read_text(encoding="utf-8"))
        for task, metrics in content["results"].items():
            if task not in SCORES:
                print(f"{path}: no column for {task}, left out", file=sys.stderr)
                continue
            wanted = SCORES[task]
            if not isinstance(metrics.get(wanted.metric), int | float):
                raise ValueError(f"{path}: {task} has no {wanted.metric}")
            run.scores[task] = metrics[wanted.metric] * wanted.scale
            asked = content["n-samples"][task]
            run.questions[task] = (asked["effective"], asked["original"])
            run.prompt_tokens[task] = _prompt_tokens(path, task)
    _check_same_questions(runs)
    return runs


def _prompt_tokens(results: Path, task: str) -> list[int]:
    """Of each question, as far as lmms-eval has noted it in its samples."""
    samples = results.with_name(results.name.replace("_results.json", f"_samples_{task}.jsonl"))
    if not samples.is_file():
        return []
    rows = map(json.loads, samples.read_text(encoding="utf-8").splitlines())
    return [used["input_tokens"] for row in rows for used in row.get("token_counts") or [] if used]


def _check_same_questions(runs: Mapping[str, Run]) -> None:
    seen: dict[str, tuple[str, tuple[int, int]]] = {}
    for name, run in runs.items():
        for task, asked in run.questions.items():
            other, number = seen.setdefault(task, (name, asked))
            if number != asked:
                raise ValueError(
                    f"{task}: {asked[0]} questions in {name}, {number[0]} in {other}: "
                    "remove one of the two and measure it again"
                )


def make_table(runs: Mapping[str, Run], paper: Mapping[str, Any] | None) -> str:
    """Markdown: the runs, each with the paper's row below it, and what the columns are."""
    full = runs.get(FULL, Run()).columns()
    found = {column for run in runs.values() for column in (full or run.columns())}
    if not found:
        raise ValueError("none of the tasks has a column")
    if paper and not found.intersection(paper["columns"]):
        paper = None  # other tasks than the paper's: a table of their own
    known = paper["columns"] if paper else list(dict.fromkeys(s.column for s in SCORES.values()))
    columns = [column for column in known if column in found]
    full = {column: full[column] for column in columns if column in full}
    paper_full = dict(zip(paper["columns"], paper["full"], strict=True)) if paper else {}
    paper_full = {column: paper_full[column] for column in columns if paper}

    lines = [
        "| " + " | ".join(["budget", "method", *columns, "Rel.", "prompt tokens"]) + " |",
        "|---|---|" + "---:|" * (len(columns) + 2),
    ]
    for name in sorted(runs, key=_rank):
        method, budget = _parts(name)
        scores = runs[name].columns()
        tokens = [count for counts in runs[name].prompt_tokens.values() for count in counts]
        mean = f"{fmean(tokens):.1f}" if tokens else "–"
        rel = relative(scores, full)
        lines.append(_row(budget, method, columns, scores, rel, mean))
        if paper is None:
            continue
        if name == FULL:
            theirs, rel = paper_full, 100.0
        else:
            row = paper["budgets"].get(budget, {}).get(method)
            if row is None:
                continue
            theirs = dict(zip(paper["columns"], row["scores"], strict=True))
            whole = len(columns) == len(paper["columns"])
            rel = row["rel"] if whole else relative(theirs, paper_full)
        lines.append(_row(budget, f"{method} (paper)", columns, theirs, rel, ""))
    return "\n".join([*lines, "", *_notes(runs, columns, paper)])


def _notes(
    runs: Mapping[str, Run], columns: Sequence[str], paper: Mapping[str, Any] | None
) -> list[str]:
    notes = ["Measured by lmms-eval; prompt tokens are the mean over all questions, text included."]
    asked = {task: number for run in runs.values() for task, number in run.questions.items()}
    for task, (number, of) in asked.items():
        score = SCORES[task]
        if score.column not in columns:
            continue
        part = f"{number:,}" if number == of else f"the first {number:,} of {of:,}"
        scale = f" x {score.scale:g}" if score.scale != 1 else ""
        metric = score.metric.removesuffix(",none")
        notes.append(f"- {score.column}: `{task}`, `{metric}`{scale}, {part} questions")
    if paper:
        notes.append(f"\nPaper: {paper['name']}, `{paper['table']}`.")
        missing = [column for column in paper["columns"] if column not in columns]
        if missing:
            notes.append(
                f"Not measured: {', '.join(missing)}. Rel. is over the other columns in all rows, "
                "the paper's too."
            )
    return notes


def _row(
    budget: str,
    method: str,
    columns: Sequence[str],
    scores: Mapping[str, float],
    rel: float | None,
    tokens: str,
) -> str:
    cells = [f"{scores[column]:.1f}" if column in scores else "–" for column in columns]
    shown = "–" if rel is None else f"{rel:.1f}"
    return "| " + " | ".join([budget, method, *cells, shown, tokens]) + " |"


def _parts(name: str) -> tuple[str, str]:
    """Method and budget of a run."""
    if name == FULL:
        return "unpruned", "all"
    method, dash, budget = name.rpartition("-")
    if not dash or not budget.removesuffix("%").replace(".", "", 1).isdigit():
        raise ValueError(f"{name!r} is not a run: folders are called {FULL} or METHOD-BUDGET")
    return method, budget


def _rank(name: str) -> tuple[bool, bool, float, str]:
    """Unpruned first, then large budgets before small ones; shares after numbers."""
    method, budget = _parts(name)
    if name == FULL:
        return False, False, 0, ""
    return True, budget.endswith("%"), -float(budget.removesuffix("%")), method


def read_paper(model: str) -> dict[str, Any]:
    models: dict[str, Any] = json.loads(PAPER.read_text(encoding="utf-8"))["models"]
    return dict(models[model])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="OUT of examples/eval_lmms.sh")
    models = json.loads(PAPER.read_text(encoding="utf-8"))["models"]
    parser.add_argument("--paper", choices=models, help="whose figures of the paper to show")
    args = parser.parse_args()
    try:
        runs = read_runs(args.out)
        if not runs:
            raise ValueError(f"{args.out} has no results of lmms-eval")
        print(make_table(runs, read_paper(args.paper) if args.paper else None))
    except (OSError, ValueError, KeyError) as error:
        parser.exit(1, f"lmms_table.py: {error}\n")


if __name__ == "__main__":
    main()

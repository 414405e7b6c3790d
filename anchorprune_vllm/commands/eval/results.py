# SPDX-License-Identifier: Apache-2.0
"""`results.json`: written after every run, and read again by the next command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands.eval.data import DataSet
from anchorprune_vllm.commands.eval.plan import FULL, Configuration
from anchorprune_vllm.commands.eval.scores import RESAMPLES, Score, is_right, relative, score
from anchorprune_vllm.commands.results_file import check_settings, unreadable, write_json

RESULTS_FILE = "results.json"

# Settings whose value says nothing to people.
_HASHED = {"questions": "questions", "model_files": "files of the model"}


@dataclass(frozen=True)
class Run:
    """One configuration on one data set."""

    configuration: Configuration
    data: str
    score: Score
    right: tuple[bool, ...]
    answers: tuple[str, ...]
    prompt_tokens: float | None
    """Mean over the questions."""
    seconds: float | None

    @classmethod
    def of_answers(
        cls,
        configuration: Configuration,
        data: DataSet,
        answers: Sequence[str],
        prompt_tokens: float | None = None,
        seconds: float | None = None,
    ) -> Run:
        """Judge the answers to all questions of a data set."""
        right = tuple(
            is_right(answer, question.answers)
            for answer, question in zip(answers, data.questions, strict=True)
        )
        return cls(
            configuration,
            data.name,
            score(right, data.picture_of, data.kind_of),
            right,
            tuple(answers),
            prompt_tokens,
            seconds,
        )


class Results:
    """All runs of one output directory; the same settings for all."""

    def __init__(
        self, directory: Path, settings: Mapping[str, Any], data: Sequence[DataSet]
    ) -> None:
        self.path = directory / RESULTS_FILE
        self.settings = dict(settings)
        self.data = list(data)
        self.runs: list[Run] = []
        self.commands: list[str] = []
        if self.path.exists():
            self._read()

    def __contains__(self, asked: tuple[Configuration, str]) -> bool:
        return asked in {(run.configuration, run.data) for run in self.runs}

    def add(self, *runs: Run) -> None:
        """Keep runs, and write the file."""
        self.runs += runs
        self._write()

    def accuracies(self, configuration: Configuration) -> dict[str, float]:
        """By data set, in their order."""
        found = {r.data: r.score.accuracy for r in self.runs if r.configuration == configuration}
        return {data.name: found[data.name] for data in self.data if data.name in found}

    def relative(self, configuration: Configuration) -> float | None:
        """Rel. over all data sets."""
        return relative(self.accuracies(configuration), self.accuracies(Configuration(FULL)))

    def _read(self) -> None:
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            found, runs = stored["settings"], [_run(row) for row in stored["runs"]]
            commands = stored["commands"]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise unreadable(self.path, error) from error
        check_settings(self.path, found, self.settings, _HASHED)
        self.runs, self.commands = runs, commands

    def _write(self) -> None:
        content = {
            "settings": self.settings,
            "commands": self.commands,
            "resamples": RESAMPLES,
            "data": {
                data.name: {
                    "questions_per_picture": [len(picture.questions) for picture in data.pictures],
                    # Which questions are of a kind, in the form of "right".
                    "kinds": {
                        kind: _bits(found == kind for found in data.kind_of)
                        for kind in sorted({*data.kind_of})
                    },
                }
                for data in self.data
            },
            "runs": [self._row(run) for run in self.runs],
        }
        write_json(self.path, content, ensure_ascii=False)

    def _row(self, run: Run) -> dict[str, Any]:
        full = {
            name: accuracy
            for name, accuracy in self.accuracies(Configuration(FULL)).items()
            if name == run.data
        }
        return {
            **asdict(run.configuration),
            "data": run.data,
            "accuracy": run.score.accuracy,
            "interval": [run.score.low, run.score.high],
            "kinds": run.score.kinds,
            "relative": relative({run.data: run.score.accuracy}, full),
            "prompt_tokens": run.prompt_tokens,
            "seconds": run.seconds,
            "right": _bits(run.right),
            "answers": run.answers,
        }


def _run(row: Mapping[str, Any]) -> Run:
    low, high = row["interval"]
    return Run(
        Configuration(*(row[name] for name in ("method", "positions", "query", "budget"))),
        row["data"],
        Score(row["accuracy"], low, high, row["kinds"]),
        tuple(bit == "1" for bit in row["right"]),
        tuple(row["answers"]),
        row["prompt_tokens"],
        row["seconds"],
    )


def _bits(values: Any) -> str:
    return "".join("01"[bool(value)] for value in values)

# SPDX-License-Identifier: Apache-2.0
"""`results.json` of an evaluation, which is written after every run and can be continued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, PlainSerializer, PrivateAttr

from anchorprune_vllm.commands.eval.data import DataSet
from anchorprune_vllm.commands.eval.plan import FULL, Configuration
from anchorprune_vllm.commands.eval.scores import RESAMPLES, is_right, relative, score
from anchorprune_vllm.commands.results_file import ResumableResults

RESULTS_FILE = "results.json"


def _to_bits(values: Iterable[bool]) -> str:
    return "".join("01"[value] for value in values)


def _from_bits(written: Any) -> Any:
    return [bit == "1" for bit in written] if isinstance(written, str) else written


_Bits = Annotated[tuple[bool, ...], BeforeValidator(_from_bits), PlainSerializer(_to_bits)]


@dataclass(frozen=True)
class Run:
    """A configuration on a data set: what it answered, and how much of it was right."""

    method: str
    positions: str | None
    query: str | None
    budget: str | None
    data: str
    accuracy: float
    interval: tuple[float, float]
    kinds: dict[str, float]
    """Accuracy of each kind of question."""
    right: _Bits = ()
    answers: tuple[str, ...] = ()
    prompt_tokens: float | None = None
    """Mean over the questions."""
    seconds: float | None = None
    relative: float | None = field(default=None, compare=False)
    """Rel. on this data set; None as long as the unpruned model has not run."""

    @property
    def configuration(self) -> Configuration:
        """What was run."""
        return Configuration(self.method, self.positions, self.query, self.budget)

    @classmethod
    def of_answers(
        cls, configuration: Configuration, data: DataSet, answers: Sequence[str], **costs: float
    ) -> Run:
        """Judge the answers to all questions of a data set; `costs`: prompt tokens and seconds."""
        right = tuple(
            is_right(answer, question.answers)
            for answer, question in zip(answers, data.questions, strict=True)
        )
        scores = score(right, data.picture_of, data.kind_of)
        found: dict[str, Any] = vars(configuration) | vars(scores) | costs
        return cls(data=data.name, right=right, answers=tuple(answers), **found)


class EvalResults(ResumableResults):
    """All runs in an output directory, made with the same settings on the same data."""

    titles: ClassVar = {"questions": "questions", "model_files": "files of the model"}
    runs: list[Run]
    _path: Path = PrivateAttr()
    _data: list[DataSet] = PrivateAttr()

    @classmethod
    def open(cls, directory: Path, settings: Mapping[str, Any], data: Sequence[DataSet]) -> Self:
        """Return the results in a directory, or new ones if there are none."""
        path = directory / RESULTS_FILE
        results = cls(settings=dict(settings), commands=[], runs=[]).continued(path)
        results._path, results._data = path, list(data)
        return results

    @property
    def data(self) -> list[DataSet]:
        """The data sets, in the order they were asked for."""
        return self._data

    def __contains__(self, asked: tuple[Configuration, str]) -> bool:
        return asked in {(run.configuration, run.data) for run in self.runs}

    def accuracies(self, configuration: Configuration) -> dict[str, float]:
        """Return the accuracy of a configuration on each data set that it has run on."""
        return {run.data: run.accuracy for run in self.runs if run.configuration == configuration}

    def relative(self, configuration: Configuration) -> float | None:
        """Return Rel. over all data sets."""
        return relative(self.accuracies(configuration), self.accuracies(Configuration(FULL)))

    def add(self, *runs: Run) -> None:
        """Keep runs, and write the file; beside them, what paired comparisons need of the data."""
        self.runs += runs
        full = self.accuracies(Configuration(FULL))
        for number, run in enumerate(self.runs):
            unpruned = {name: accuracy for name, accuracy in full.items() if name == run.data}
            rel = relative({run.data: run.accuracy}, unpruned)
            self.runs[number] = replace(run, relative=rel)
        data = {
            each.name: {
                "questions_per_picture": [len(picture.questions) for picture in each.pictures],
                "kinds": {
                    kind: _to_bits(found == kind for found in each.kind_of)
                    for kind in sorted({*each.kind_of})
                },
            }
            for each in self.data
        }
        self.save(self._path, resamples=RESAMPLES, data=data)

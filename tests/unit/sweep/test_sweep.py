# SPDX-License-Identifier: Apache-2.0
"""The sweep: trials that die or hang are rows, what was tried is not tried again, and the page."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anchorprune_vllm.commands.models.record import Record, Trial, read_record
from anchorprune_vllm.models import ARCHITECTURES
from anchorprune_vllm.testing.tiny_models import TINY_MODELS
from tests.support.asking import Answer
from tests.support.families import FAMILIES, LINEAR_ATTENTION
from tests.support.reference import REFERENCES
from tests.sweep import __main__ as sweep
from tests.sweep.page import PAGE, with_architectures
from tests.sweep.trial import Asked, Item, are_positions_kept, is_counted

BEGUN = Trial("tiny", "Tiny", "begun")


def ends(name: str, directory: Path) -> Iterator[Trial]:
    yield replace(BEGUN, outcome="equal")


def dies(name: str, directory: Path) -> Iterator[Trial]:
    yield BEGUN
    os.abort()


def hangs(name: str, directory: Path) -> Iterator[Trial]:
    yield BEGUN
    time.sleep(600)


def cannot_be_made(name: str, directory: Path) -> Iterator[Trial]:
    raise ValueError(f"no {name} here")
    yield BEGUN


@pytest.mark.parametrize(
    ("what", "outcome", "why"),
    [
        (ends, "equal", ""),
        (dies, "failed", "its process ended with -6"),
        (hangs, "timed out", "no result after 5 s"),
        (cannot_be_made, "failed", "its process ended with 1"),
    ],
)
def test_what_becomes_of_a_process_is_a_trial(
    what: Any, outcome: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sweep, "try_checkpoint", what)
    trial = sweep.run_trial("tiny", tmp_path, time_limit=5)
    assert (trial.checkpoint, trial.outcome, trial.why) == ("tiny", outcome, why)


def test_a_sweep_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[str] = []

    def run_trial(name: str, results: Path, time_limit: float) -> Trial:
        tried.append(name)
        return Trial(name, "AriaForConditionalGeneration", "equal", "full")

    written: list[Record] = []
    monkeypatch.setattr(sweep, "run_trial", run_trial)
    monkeypatch.setattr(sweep, "CHECKPOINTS", ("one", "two"))
    monkeypatch.setattr(sweep, "write_record", written.append)
    monkeypatch.setattr(sweep, "RECORD", tmp_path / "none yet")
    monkeypatch.setattr(sweep, "write_page", lambda record: None)
    options = ["--directory", str(tmp_path)]
    sweep.main(["one", *options])
    sweep.main(["one", "two", *options])
    assert tried == ["one", "two"]
    first, record = written
    assert [trial.checkpoint for trial in first.trials] == ["one"]
    assert [trial.checkpoint for trial in record.trials] == ["one", "two"]
    assert record.architectures["AriaForConditionalGeneration"].untried == ""
    assert "no tiny checkpoint" in record.architectures["Phi3VForCausalLM"].untried
    assert "not tried yet" in record.architectures["Gemma3ForConditionalGeneration"].untried
    sweep.main(["one", "--again", *options])
    assert tried == ["one", "two", "one"]


def asked(prompt: int, *items: Item, positions: Any = ()) -> Asked:
    return Asked(Answer(prompt, [1], [-1.0]), [*items], [*positions])


def test_counting() -> None:
    """Of an image of 70 tokens in the prompt, 64 are embeddings and the others end its rows."""
    whole = asked(100, Item(70, 64), Item(9, 9))
    twelve = asked(42, Item(12, 12), Item(9, 9))
    assert is_counted(whole, twelve, 12)
    assert not is_counted(whole, twelve, 5)
    assert not is_counted(whole, asked(43, *twelve.items), 12)
    assert is_counted(whole, whole, "100%")
    assert not is_counted(whole, asked(42, *twelve.items), "100%")
    assert is_counted(whole, asked(40, Item(16, 16), Item(3, 3)), "25%")
    assert not is_counted(whole, twelve, "25%")  # the second image is whole


def test_positions() -> None:
    answer = [(place,) * 3 for place in range(50, 57)]
    media = [(0, row, column) for row in range(2) for column in range(3)]
    unpruned = [*media, (3, 3, 3), *answer]
    assert are_positions_kept(unpruned, [media[1], media[5], (3, 3, 3), *answer])
    assert not are_positions_kept(unpruned, [media[5], media[1], (3, 3, 3), *answer])
    assert not are_positions_kept(unpruned, [media[1], (2, 2, 2), *answer])
    assert not are_positions_kept(unpruned, [media[1], (3, 3, 3), *answer[:-1], (9, 9, 9)])
    assert not are_positions_kept(unpruned, [media[1], (3, 3, 3), *answer[1:]])


def test_the_page_is_written_from_the_record() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_architectures(page, read_record())


def test_the_record_knows_all_references_and_each_is_compared() -> None:
    assert read_record().references == sorted(REFERENCES)
    compared = {TINY_MODELS[name].architecture for name in (*FAMILIES, *LINEAR_ATTENTION)}
    assert {*REFERENCES} == compared | ARCHITECTURES.keys()

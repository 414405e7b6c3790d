# SPDX-License-Identifier: Apache-2.0
"""`anchorprune models`: what it says of each architecture, and where it takes that from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from anchorprune_vllm.commands.main import main
from anchorprune_vllm.commands.models import record, registry
from anchorprune_vllm.commands.models.listing import Row, make_rows
from anchorprune_vllm.commands.models.record import (
    Architecture,
    Record,
    Trial,
    read_record,
    write_record,
)
from anchorprune_vllm.models import ARCHITECTURES, families
from anchorprune_vllm.models.families import FAMILIES

OWN, FAMILY, OTHER = "LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "Other"
SEES = Architecture(("image",))


def row_of(
    name: str, *trials: Trial, found: Architecture = SEES, references: Sequence[str] = ()
) -> Row:
    (row,) = make_rows({name: found}, Record("1.0", {name: found}, trials, references))
    return row


def trial(name: str, outcome: Any, **others: Any) -> Trial:
    return Trial("tiny", name, outcome, **others)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (row_of(OWN), ("full", "own adapter", "engine")),
        (
            row_of(OWN, trial(OWN, "equal", level="full"), references=[OWN]),
            ("full", "own adapter", "reference + engine + sweep"),
        ),
        (row_of(FAMILY), ("full", "family", "not tried")),
        (row_of(FAMILY, references=[OWN, FAMILY]), ("full", "family", "reference")),
        (
            row_of(FAMILY, trial(FAMILY, "equal", level="reduced")),
            ("reduced", "family", "sweep"),
        ),
        (row_of(OTHER), ("general", "found at load", "not tried")),
        (row_of(OTHER, trial(OTHER, "equal", level="full")), ("full", "found at load", "sweep")),
        (
            row_of(OTHER, trial(OTHER, "unequal", level="full", checks={"warm": False})),
            ("full", "found at load", "sweep failed"),
        ),
        (row_of(OTHER, trial(OTHER, "refused", why="x")), ("no", "", "not tried")),
        (
            row_of(OTHER, trial(OTHER, "unserved")),
            ("general", "found at load", "tried: vLLM does not serve it"),
        ),
        (row_of(OTHER, found=Architecture(("image",), refused="x")), ("no", "", "not tried")),
    ],
)
def test_level_and_tests(row: Row, told: tuple[str, str, str]) -> None:
    assert (row.level, row.stated_by, row.tested) == told


def test_reasons() -> None:
    assert row_of(OTHER).why == "no tiny checkpoint yet"
    assert row_of(OTHER, found=Architecture(("image",), untried="lost")).why == "lost"
    assert row_of(OTHER, trial(OTHER, "equal")).why == ""
    assert row_of(OTHER, trial(OTHER, "timed out", why="late")).why == "tiny timed out: late"
    checks = {"counted": True, "warm": False, "100%": False}
    assert row_of(OTHER, trial(OTHER, "unequal", checks=checks)).why == "tiny unequal: warm, 100%"
    one_of_two = row_of(OWN, trial(OWN, "equal"), trial(OWN, "refused", why="no CLIP"))
    assert (one_of_two.level, one_of_two.why) == ("full", "tiny refused: no CLIP")


def test_what_does_not_see_is_left_out() -> None:
    assert make_rows({OTHER: Architecture(())}, Record("1.0", {}, [])) == []


def test_families_of_other_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(OTHER, "their_module:Theirs", families.ENTRY_POINTS)
    monkeypatch.setattr(families, "_installed", lambda: {OTHER: point})
    row = row_of(OTHER, trial(OTHER, "equal", level="full"))
    assert (row.level, row.stated_by) == ("general", "family of their_module:Theirs")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    architectures = {OWN: SEES, OTHER: Architecture(("image", "video"), untried="lost")}
    trials = [trial(OWN, "equal", level="full", checks={"warm": True})]
    written = Record("1.0", architectures, trials, references=[OWN])
    write_record(written, tmp_path / "record.json")
    read = read_record(tmp_path / "record.json")
    assert read.vllm == "1.0"
    assert read.trials == trials
    assert make_rows(read.architectures, read) == make_rows(architectures, written)


def test_the_record_in_the_package_knows_all_that_is_stated() -> None:
    known = read_record().architectures
    assert {*ARCHITECTURES, *FAMILIES} <= known.keys()


def test_classes_tell_what_they_see() -> None:
    assert registry.look_at("AriaForConditionalGeneration").media == ("image",)
    assert registry.look_at("Qwen3VLForConditionalGeneration").media == ("image", "video")
    assert registry.look_at("Gemma4ForConditionalGeneration").media == ("image", "video")
    assert registry.look_at("VoxtralForConditionalGeneration").media == ()
    assert registry.look_at(OWN).media == ("image",)
    refused = registry.look_at("NemotronParseForConditionalGeneration").refused
    assert refused == "it is an encoder-decoder"


def test_only_unknown_classes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    def look_at(name: str) -> Architecture:
        looked_at.append(name)
        return SEES

    monkeypatch.setattr(registry, "look_at", look_at)
    monkeypatch.setattr(registry, "multimodal_architectures", lambda: [OWN, OTHER])
    known = {OWN: Architecture(("video",)), "Gone": SEES}
    found = registry.installed_architectures(known)
    assert found == {OWN: Architecture(("video",)), OTHER: SEES}
    assert looked_at == [OTHER]


@pytest.fixture
def small_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "multimodal_architectures", lambda: [OWN, OTHER])
    small = Record("0.1", {OWN: SEES, OTHER: SEES}, [trial(OTHER, "refused", why="too odd")])
    monkeypatch.setattr(record, "read_record", lambda: small)
    monkeypatch.setenv("COLUMNS", "200")


def test_the_table(small_record: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "tiny refused: too odd" in shown
    assert shown.rstrip().endswith("the sweep was recorded with vLLM 0.1.")


def test_json(small_record: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["recorded_with"] == "0.1"
    levels = {model["architecture"]: model["level"] for model in printed["models"]}
    assert levels == {OWN: "full", OTHER: "no"}
    assert {*printed["models"][0]} == {*Row.__dataclass_fields__}

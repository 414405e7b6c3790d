# SPDX-License-Identifier: Apache-2.0
"""Who is asked what, and what is kept of it: with stand-ins for servers and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from anchorprune_vllm.commands.asking import Answer
from anchorprune_vllm.commands.bench import probes, questions
from anchorprune_vllm.commands.bench.probes import StageTimes
from anchorprune_vllm.commands.bench.served import Comparison
from anchorprune_vllm.commands.bench.shapes import MediaSize
from anchorprune_vllm.commands.chosen_methods import parse_methods


class Model:
    name, media, text_encoder, notes = "m", MediaSize(8, 8), "clip", ()

    def __init__(self) -> None:
        self.started: list[list[str]] = []

    @contextmanager
    def serve(self, flags: list[str], log: Path) -> Iterator[SimpleNamespace]:
        self.started.append(flags)
        yield SimpleNamespace(url="")


def test_questions_differ() -> None:
    assert len({questions.question(number) for number in range(400)}) == 400


def test_a_method_that_would_not_start_is_found_before_a_server_does(tmp_path: Path) -> None:
    model = Model()
    wanted = Comparison(model, parse_methods(["scope:alpha=x"]), ["8"], tmp_path, "me")
    with pytest.raises(ValueError, match="the method scope fails on an item"):
        questions.run_questions(wanted, 2)
    assert model.started == []


def test_each_server_is_asked_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def ask(client, media, text, **options):
        asked.append((media.url, text))
        return Answer(100, 9.0 if len(asked) % 3 == 1 else 0.5, "")

    seconds = iter(range(100))
    monkeypatch.setattr(questions, "ask", ask)
    monkeypatch.setattr(questions, "connect", lambda url: None)
    monkeypatch.setattr(
        probes,
        "read_times",
        lambda server: StageTimes(embedding_seconds=2.0 * next(seconds), selection_seconds=0.5),
    )
    model = Model()
    methods = parse_methods(["anchorprune"])
    found = questions.run_questions(Comparison(model, methods, ["11.1%"], tmp_path, "me"), 3)
    assert len({picture for picture, _ in asked}) == 1
    assert [text for _, text in asked] == [questions.question(n % 3) for n in range(12)]
    ours = [
        *("--anchorprune-budget", "11.1%", "--anchorprune-method", "anchorprune"),
        *("--anchorprune-text-encoder", "clip"),
    ]
    without_cache = [*ours, "--anchorprune-config", '{"feature_cache_mb": 0}']
    assert model.started == [[], ["--no-enable-prefix-caching"], ours, without_cache]
    assert [(one.further_ms, one.embedding_seconds) for one in found] == [(500.0, 2.0)] * 4
    stored = json.loads((tmp_path / "questions.json").read_text())
    assert stored["command"] == "me"
    assert stored["servers"][0]["seconds"] == [9.0, 0.5, 0.5]
    assert [one["name"] for one in stored["servers"]] == [
        *("unpruned", "unpruned, without prefix cache"),
        *("anchorprune, 11.1%", "anchorprune, 11.1%, without feature cache"),
    ]

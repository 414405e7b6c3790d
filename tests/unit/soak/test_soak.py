# SPDX-License-Identifier: Apache-2.0
"""The soak: what it draws, which answers differ, and what becomes of a model that has ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.soak import __main__ as command
from tests.soak import serving
from tests.soak.comparing import BFLOAT16, FLOAT32, Scored, compare
from tests.soak.drawing import LARGEST_BATCH, Asked, Image, Video, draw_batches, draw_pool
from tests.soak.serving import Settings, Soak, ask_warm

COLD = Scored(7, [3, 4], [{3: -0.5, 9: -0.5008}, {4: -0.1, 8: -2.0}])


def test_the_same_seed_draws_the_same() -> None:
    pool = draw_pool(5, 80, 3, videos=True)
    assert pool == draw_pool(5, 80, 3, videos=True)
    assert pool != draw_pool(6, 80, 3, videos=True)
    assert len(set(map(repr, pool))) == 80
    assert [*draw_batches(5, 80, 300)] == [*draw_batches(5, 80, 300)]
    assert pool[0].messages == draw_pool(5, 1, 3, videos=True)[0].messages


def test_what_is_drawn_is_mixed() -> None:
    pool = draw_pool(0, 150, 4, videos=True)
    images = [[part for part in asked.parts if isinstance(part, Image)] for asked in pool]
    assert {*map(len, images)} == {0, 1, 2, 3}
    shown = Counter(image for each in images for image in each)
    assert {1, 2} <= {*shown.values()}  # new ones and repeated ones
    assert len({image.size for image in shown}) > 4
    assert any(isinstance(part, Video) for asked in pool for part in asked.parts)
    overrides = [asked.override or {} for asked in pool]
    assert {type(each["budget"]) for each in overrides if "budget" in each} == {int, str}
    assert any("query" in each for each in overrides)
    assert {} in overrides
    assert any(asked.follow_up for asked in pool)


def test_a_model_is_asked_for_no_more_than_it_takes() -> None:
    pool = draw_pool(0, 150, 1, videos=False)
    media = [[part for part in asked.parts if not isinstance(part, str)] for asked in pool]
    assert max(map(len, media)) == 1
    assert not any(isinstance(part, Video) for each in media for part in each)


def test_batches_have_so_many_requests_and_no_more() -> None:
    batches = [*draw_batches(0, 10, 2000)]
    assert sum(map(len, batches)) == 2000
    sizes = {*map(len, batches)}
    assert 1 in sizes
    assert 40 < max(sizes) <= LARGEST_BATCH
    assert {number for batch in batches for number in batch} == {*range(10)}


@pytest.mark.parametrize(
    ("warm", "verdict"),
    [
        (COLD, "equal"),
        (COLD._replace(best=[{3: -0.5009, 9: -0.6}, COLD.best[1]]), "equal"),
        (COLD._replace(best=[{3: -0.502, 9: -0.6}, COLD.best[1]]), "different"),
        (COLD._replace(prompt=8), "different"),
        (COLD._replace(tokens=[3], best=COLD.best[:1]), "different"),
        (Scored(7, [9, 1], [{9: -0.5, 3: -0.5008}, {1: -9.0, 2: -9.5}]), "near-tie"),
        (Scored(7, [3, 8], [COLD.best[0], {8: -0.1, 4: -0.1}]), "different"),
        (Scored(7, [5, 4], [{5: -0.5, 3: -0.5}, COLD.best[1]]), "different"),
    ],
)
def test_answers_differ_unless_precision_decides(warm: Scored, verdict: str) -> None:
    assert compare(COLD, warm, FLOAT32) == verdict


def test_bfloat16_decides_less() -> None:
    warm = COLD._replace(best=[{3: -0.55, 9: -0.6}, COLD.best[1]])
    assert compare(COLD, warm, FLOAT32) == "different"
    assert compare(COLD, warm, BFLOAT16) == "equal"
    assert compare(COLD, COLD._replace(tokens=[3, 8]), BFLOAT16) == "different"


class Engine:
    """Answers each request with its number of tokens, but for one that it answers otherwise."""

    def __init__(self, wrong_place: int | None) -> None:
        self.asked, self.wrong_place = 0, wrong_place

    def answer(self, llm: Any, batch: Sequence[Asked]) -> list[Scored]:
        answers = []
        for asked in batch:
            self.asked += 1
            answer = cold_answer(asked)
            if self.asked == self.wrong_place:
                answer = answer._replace(tokens=[99, *answer.tokens[1:]])
            answers.append(answer)
        return answers


def cold_answer(asked: Asked) -> Scored:
    tokens = [*range(asked.answer_tokens)]
    return Scored(1, tokens, [{token: -0.1, token + 50: -5.0, 99: -6.0} for token in tokens])


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Soak]:
    """Soak an engine that answers at once."""

    def run(engine: Engine, settings: Settings) -> Soak:
        class Workers:
            def collective_rpc(self, function: Any) -> None:
                assert function is serving.watch_features

        monkeypatch.setattr(serving, "forget", lambda llm: None)
        monkeypatch.setattr(serving, "ask", engine.answer)
        monkeypatch.setattr(serving, "read_counts", lambda llm: {"preemptions": engine.asked})
        pool = draw_pool(settings.seed, settings.pool, 3, videos=False)
        cold = [cold_answer(asked) for asked in pool]
        begun = Soak("tiny", vars(settings))
        (*_, last) = ask_warm(Workers(), begun, pool, cold, settings, FLOAT32)
        last.is_finished = True
        return last

    return run


def test_all_requests_are_counted(soak: Callable[..., Soak]) -> None:
    found = soak(Engine(None), Settings(requests=500, pool=20))
    assert (found.requests, found.equal, found.different) == (500, 500, 0)
    assert found.is_well
    assert found.counts == {"preemptions": 500}


def test_a_differing_answer_is_reported(soak: Callable[..., Soak]) -> None:
    settings = Settings(requests=500, pool=20, seed=3)
    found = soak(Engine(123), settings)
    assert (found.requests, found.equal, found.different) == (500, 499, 1)
    assert not found.is_well
    (differing,) = found.differing
    assert differing["place"] == 123
    asked = [number for batch in draw_batches(3, 20, 500) for number in batch]
    assert differing["number"] == asked[122]
    said = command.reproduce(found)
    assert "tiny: request 123 has another answer" in said
    assert json.dumps(draw_pool(3, 20, 3, videos=False)[asked[122]]._asdict()) in said
    assert "(its logprobs differ)" not in said
    assert said.endswith("--seed 3 --pool 20 --runner V1 --requests 500")


def test_time_ends_a_soak_that_says_how_far_it_came(soak: Callable[..., Soak]) -> None:
    found = soak(Engine(None), Settings(requests=500, pool=20, minutes=0))
    assert 0 < found.requests < 500
    assert found.why == "ended after 0 minutes"
    assert found.is_well


def ended(name: str, directory: Path, settings: Settings) -> Iterator[Soak]:
    count = settings.requests
    yield Soak(name, vars(settings), count, count, is_finished=True)


def differs(name: str, directory: Path, settings: Settings) -> Iterator[Soak]:
    first = {"place": 1, "asked": {}, "cold": {"tokens": [1]}, "warm": {"tokens": [2]}}
    yield Soak(name, vars(settings), 5, 4, differing=[first], is_finished=True)


def leaves_a_process(name: str, directory: Path, settings: Settings) -> Iterator[Soak]:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    yield from ended(name, directory, settings)


def dies(name: str, directory: Path, settings: Settings) -> Iterator[Soak]:
    yield Soak(name, vars(settings), 3, 3)
    os.abort()


def hangs(name: str, directory: Path, settings: Settings) -> Iterator[Soak]:
    yield Soak(name, vars(settings))
    time.sleep(600)


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [
        (ended, 0, "tiny 50 50 0 0"),
        (leaves_a_process, 0, "tiny 50 50 0 0"),
        (differs, 1, "tiny: request 1 has another answer than when it was asked alone"),
        (dies, 1, "its process ended with -6"),
        (hangs, 1, "no result after 3 s"),
    ],
)
def test_what_became_of_a_model(
    what: Any,
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "soak_model", what)
    monkeypatch.setattr(command, "_START_SECONDS", 3 if what is hangs else 300)
    options = ["--requests", "50", "--minutes", "0", "--directory", str(tmp_path)]
    assert command.main(["tiny", *options]) == status
    assert words in " ".join(capfd.readouterr().out.split())


def test_a_finished_model_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, int]] = []

    def run_soak(name: str, file: Path, settings: Settings) -> Soak:
        ran.append((name, settings.requests))
        (soak,) = ended(name, file, settings)
        command.write_json(file, asdict(soak))
        return soak

    monkeypatch.setattr(command, "run_soak", run_soak)
    for *names_and_options, expected in (
        ("one", "--requests", "50", [("one", 50)]),
        ("one", "two", "--requests", "20", [("two", 20)]),  # 50 are more than enough
        ("one", "--requests", "80", [("one", 80)]),
        ("one", "--requests", "80", "--seed", "1", [("one", 80)]),
        ("one", "--requests", "80", "--seed", "1", []),
        ("one", "--requests", "80", "--seed", "1", "--again", [("one", 80)]),
        ("one", "--requests", "80", "--seed", "1", "--runner", "V2", [("one", 80)]),
    ):
        ran.clear()
        command.main([*names_and_options, "--directory", str(tmp_path)])
        assert ran == expected
    assert "one 80 80 0 0" in " ".join(capfd.readouterr().out.split())

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from anchorprune_vllm.commands.eval.data import (
    DataSet,
    blind_guesses,
    first_questions,
    load_data,
)
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE, scene
from anchorprune_vllm.commands.eval.vqa_data import Picture, Question, easy_vqa


def asked(*counts: int) -> list[Picture]:
    """Pictures with so many questions."""
    return [
        Picture(Image.Image, tuple(Question(f"{n}.{i}?", ("a",), "all") for i in range(count)))
        for n, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("limit", "taken"), [(None, 4), (1, 1), (3, 1), (7, 2), (8, 3), (11, 3), (12, 4), (99, 4)]
)
def test_whole_pictures_up_to_the_limit(limit: int | None, taken: int) -> None:
    pictures = asked(3, 4, 1, 4)
    assert first_questions(pictures, limit) == tuple(pictures[:taken])


def test_questions_know_their_picture() -> None:
    data = DataSet("mine", tuple(asked(2, 1)))
    assert [question.text for question in data.questions] == ["0.0?", "0.1?", "1.0?"]
    assert data.picture_of == [0, 0, 1]
    assert data.kind_of == ["all"] * 3


def test_fingerprint_sees_questions_and_their_pictures() -> None:
    def of(*counts: int) -> str:
        pictures = [
            Picture(Image.Image, (Question("?", ("a",), "all"),) * count) for count in counts
        ]
        return DataSet("mine", tuple(pictures)).fingerprint()

    assert of(2, 1) == of(2, 1)
    assert len({of(2, 1), of(1, 2), of(3), of(2)}) == 4


def test_sets_by_name(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    row = {"image": "a.png", "question": "what?", "answers": ["a"]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    easy, drawn, mine = load_data(["easy-vqa", "scenes", str(tmp_path / "mine.jsonl")], 30)
    assert [easy.name, drawn.name, mine.name] == ["easy-vqa", "scenes", "mine"]
    assert easy.pictures[0].questions == easy_vqa("test")[0].questions
    assert drawn.pictures[0].questions == scene(FIRST_TEST_SCENE).questions
    assert 10 < len(easy.questions) <= 30
    assert 10 < len(drawn.questions) <= 30
    assert mine.questions == (Question("what?", ("a",), "all"),)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["vqav2"],
            "there is no file 'vqav2', nor such a set: give easy-vqa, scenes, clutter, or",
        ),
        (["scenes", "scenes"], "two data sets are called 'scenes'"),
    ],
)
def test_wrong_names(names: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_data(names, 10)


def test_a_file_does_not_take_the_guesses_of_another_set(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    row = {"image": "a.png", "question": "what?", "answers": ["a"]}
    path = tmp_path / "scenes.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match="has the name of another data set"):
        load_data([str(path)], 10)


@pytest.mark.parametrize("name", ["easy-vqa", "scenes"])
def test_blind_guesses_know_all_questions_and_not_the_pictures(name: str) -> None:
    guesses = blind_guesses(name)
    (data,) = load_data([name], 2000)
    right = [guesses[question.text] in question.answers for question in data.questions]
    assert 0.3 < sum(right) / len(right) < 0.9
    assert blind_guesses("mine") is None


def test_drawn_sets_never_change() -> None:
    """Models were trained on them, and published tables were measured on them."""
    fingerprints = [data.fingerprint() for data in load_data(["scenes", "clutter"], None)]
    assert fingerprints == ["88a985108d93a70a", "558ae13cfc8a18d1"]

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from anchorprune_vllm.commands.eval.vqa_data import (
    SIMPLE_COLOURS,
    SIMPLE_SHAPES,
    Picture,
    Question,
    blind_answers,
    easy_vqa,
    jsonl,
    kind_of,
)

# --- easy-vqa -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["train", "test"])
def pictures(request: pytest.FixtureRequest) -> list[Picture]:
    return easy_vqa(request.param)


def test_easy_vqa_is_complete() -> None:
    train, test = easy_vqa("train"), easy_vqa("test")
    assert (len(train), len(test)) == (4000, 1000)
    assert sum(len(picture.questions) for picture in train + test) == 48_248


def fits(question: Question, colour: str, shape: str) -> bool:
    """Whether question and answer are true of such a picture: the words read anew."""
    words = question.text.rstrip("?").split()
    named = [word for word in words if word in SIMPLE_COLOURS + SIMPLE_SHAPES]
    is_so = all(word in (colour, shape) for word in named)
    if words[0] == "what":  # "what color is the circle?": there is one
        return is_so and question.answers == (colour if "color" in words else shape,)
    is_denied = "no" in words or "not" in words
    return question.answers == ("yes" if is_so != is_denied else "no",)


def test_captions_agree_with_all_answers(pictures: list[Picture]) -> None:
    unknown = 0
    for picture in pictures:
        possible = [
            f"a {colour} {shape}"
            for colour in SIMPLE_COLOURS
            for shape in SIMPLE_SHAPES
            if all(fits(question, colour, shape) for question in picture.questions)
        ]
        if picture.caption is None:
            unknown += len(possible) == 1
        else:
            assert possible == [picture.caption]
    # Some could be told by what the picture does not show. That is not tried.
    assert unknown < 0.01 * len(pictures)


def test_easy_vqa_has_three_kinds(pictures: list[Picture]) -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for picture in pictures:
        for question in picture.questions:
            found[question.kind].update(question.answers)
    assert found == {
        "yes/no": {"yes", "no"},
        "shape": {*SIMPLE_SHAPES},
        "colour": {*SIMPLE_COLOURS},
    }


def test_pictures_are_read_when_asked_for(pictures: list[Picture]) -> None:
    image = pictures[0].load()
    assert (image.mode, image.size) == ("RGB", (64, 64))


def test_easy_vqa_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    with pytest.raises(RuntimeError, match=r"pip install '.\[eval\]'"):
        easy_vqa("test")


def test_kinds_of_answers() -> None:
    assert [kind_of(answer) for answer in ("no", "circle", "teal")] == ["yes/no", "shape", "colour"]


# --- files of the user's ------------------------------------------------------------------------


def write(folder: Path, *rows: Any) -> Path:
    Image.new("L", (5, 4), 200).save(folder / "one.png")
    (folder / "two.png").write_bytes((folder / "one.png").read_bytes()[:45])
    (folder / "words.png").write_text("not a picture")
    path = folder / "questions.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


GOOD = {"image": "one.png", "question": "what?", "answers": ["a", "b"]}


def test_jsonl_gathers_questions_by_picture(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        GOOD,
        "",
        {**GOOD, "image": "two.png", "answers": [2]},
        {**GOOD, "question": "a\u2028line?", "kind": "more"},
    )
    one, two = jsonl(path)
    assert one.questions == (
        Question("what?", ("a", "b"), "all"),
        Question("a\u2028line?", ("a", "b"), "more"),
    )
    assert two.questions == (Question("what?", ("2",), "all"),)
    assert (one.load().mode, one.load().size, one.caption) == ("RGB", (5, 4), None)
    with pytest.raises(ValueError, match=r"cannot read the image .*two\.png"):
        two.load()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2 is not JSON (Expecting property name"),
        ("[1]", "line 2 is not a JSON object: '[1]'; give lines such as {\"image\": "),
        (
            {"image": "one.png", "answers": ["a"]},
            'line 2: question is missing; give lines such as {"image"',
        ),
        (
            {**GOOD, "answers": "yes"},
            "line 2: answers is 'yes': Input should be a valid list; give lines",
        ),
        ({**GOOD, "question": 5}, "line 2: question is 5: Input should be a valid string; give"),
        ({**GOOD, "kind": 5}, "line 2: kind is 5: Input should be a valid string; give"),
        ({**GOOD, "kind": 0}, "line 2: kind is 0: Input should be a valid string"),
        ({**GOOD, "kind": []}, "line 2: kind is []: Input should be a valid string"),
        ({**GOOD, "kind": False}, "line 2: kind is False: Input should be a valid string"),
        (
            {**GOOD, "answers": ["a", None]},
            "line 2: answers.1 is None: Input should be a valid string",
        ),
        ({**GOOD, "answers": [True]}, "line 2: answers.0 is True: Input should be a valid string"),
        (
            {**GOOD, "answers": [["a"]]},
            "line 2: answers.0 is ['a']: Input should be a valid string",
        ),
        ({**GOOD, "answers": []}, "line 2: answers is []: List should have at least 1 item"),
        ({**GOOD, "image": "none.png"}, "line 2: there is no image"),
        ({**GOOD, "image": "words.png"}, "line 2: cannot read the image"),
    ],
)
def test_jsonl_says_what_is_wrong(tmp_path: Path, row: Any, words: str) -> None:
    path = write(tmp_path, GOOD, row)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        jsonl(path)
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)


def test_a_picture_of_too_many_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, GOOD)
    (small,) = jsonl(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)  # of twice as many Pillow only warns
    with pytest.raises(ValueError, match=r"line 1: cannot read the image .*one\.png: Image size"):
        jsonl(path)
    with pytest.raises(ValueError, match=r"cannot read the image .*one\.png: Image size"):
        small.load()


def test_jsonl_needs_a_file_with_questions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"questions\.jsonl is empty: give lines such as"):
        jsonl(write(tmp_path, "", " "))
    with pytest.raises(ValueError, match=r"there is no file .*nowhere"):
        jsonl(tmp_path / "nowhere")
    (tmp_path / "questions.jsonl").write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match=r"cannot read .*questions\.jsonl"):
        jsonl(tmp_path / "questions.jsonl")


# --- what can be known without the picture ------------------------------------------------------


def test_blind_answers() -> None:
    def asked(text: str, *answers: str) -> list[Picture]:
        return [Picture(Image.Image, (Question(text, (answer,), "all"),)) for answer in answers]

    pictures = asked("which?", "b", "a", "b") + asked("tied?", "y", "x", "x", "y")
    assert blind_answers(pictures) == {"which?": "b", "tied?": "x"}

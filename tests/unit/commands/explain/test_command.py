# SPDX-License-Identifier: Apache-2.0
"""The command: what it writes, and what it refuses before a model is loaded."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from anchorprune_vllm.commands.explain.look import load
from anchorprune_vllm.commands.explain.media import read_asked
from anchorprune_vllm.commands.main import main
from anchorprune_vllm.testing.local_model import LocalModel
from tests.support.pictures import picture


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a picture, and with files that are none."""
    monkeypatch.chdir(tmp_path)
    picture(1).save("a.png")
    Path("notes.txt").write_text("words")
    Path("empty.mp4").touch()
    Path("broken.png").write_bytes(Path("a.png").read_bytes()[:200])
    return tmp_path


@pytest.mark.filterwarnings("ignore")
def test_a_picture_and_json(
    demo_model: Path, somewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["explain", str(demo_model), "a.png", "Where is the dog?", "--json", "a.json"]
    budgets = ["--budgets", "9", "25%,40"]
    methods = ["--methods", "anchorprune:tau=0.1", "visionzip"]
    assert main([*args, *budgets, *methods, "--out", "out.html"]) == 0
    found = json.loads(Path("a.json").read_text())
    assert [each["method"] for each in found["methods"]] == ["anchorprune:tau=0.1", "visionzip"]
    ours, zipped = found["methods"]
    assert [len(panel["indices"]) for panel in ours["panels"]] == [9, 36, 40]
    assert [panel["budget"] for panel in ours["panels"]] == ["9", "25%", "40"]
    assert zipped["relevance"] is None
    assert not zipped["looks_at_question"]
    assert set(zipped["panels"][0]["summed"]) > set(zipped["panels"][0]["indices"])
    assert Path("out.html").read_text().count("<svg") == 2 * (3 + 3)
    printed = capsys.readouterr().out
    assert "visionzip: 9 of 144 tokens (6.2%); sums of tokens" in printed
    assert printed.endswith("Written: out.html, a.json\n")


@pytest.mark.filterwarnings("ignore")
def test_one_model_at_a_time(
    demo_model: Path, somewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next is loaded when the memory of the one before is free."""
    models: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def counted(*args: Any) -> LocalModel:
        alive.append(sum(model() is not None for model in models))
        loaded = load(*args)
        models.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr("anchorprune_vllm.commands.explain.look.load", counted)
    args = ["explain", str(demo_model), "a.png", "Where?", "--budgets", "9"]
    gc.disable()  # what Python frees in its own time would be in time only by chance
    try:
        assert main([*args, "--methods", "random", "anchorprune"]) == 0
    finally:
        gc.enable()
    assert alive == [0, 0]


@pytest.mark.filterwarnings("ignore")
def test_without_a_question(demo_model: Path, somewhere: Path) -> None:
    args = ["explain", str(demo_model), "scene:3", "--query", "none", "--budgets", "9"]
    assert main([*args, "--json", "a.json"]) == 0
    (method,) = json.loads(Path("a.json").read_text())["methods"]
    assert method["relevance"] is None
    assert not any(method["panels"][0]["is_anchor"])
    assert Image.open("explain.png").size == (4 * (340 + 18) + 18, Image.open("explain.png").height)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["demo", "b.png", "Why?"], "there is no file b.png: give an image or a video"),
        (["demo", "notes.txt", "Why?"], "notes.txt is neither an image that Pillow can read"),
        (["demo", "empty.mp4", "Why?"], "empty.mp4 is neither an image"),
        (["demo", "broken.png", "Why?"], "broken.png is neither an image"),
        (["demo", "a.png"], "there is no question about a.png"),
        (["demo", "a.png", " "], "there is no question about a.png"),
        (["demo", "scene:x"], "there is no scene 'x': give scene:0 to scene:999"),
        (["demo", "scene:1000"], "there is no scene '1000'"),
        (["demo", "a.png", "Why?", "--out", "a.jpg"], "--out is a.jpg: give a name that ends in"),
        (["demo", "a.png", "Why?", "--out", "no/a.png"], "there is no directory no"),
        (["demo", "a.png", "Why?", "--json", "."], ". cannot be written"),
        (["demo", "a.png", "Why?", "--out", "/proc/a.png"], "/proc/a.png cannot be written"),
        (["demo", "a.png", "Why?", "--text-encoder", "x"], "no text encoder directory 'x'"),
        (["demo", "a.png", "Why?", "--engine-args", '{"dtype": "x"}'], "dtype is 'x': give one"),
        (["demo", "a.png", "Why?", "--engine-args", '{"x": 1}'], "which vLLM does not know"),
        (["./none", "a.png", "Why?"], "there is no model directory './none'"),
    ],
)
def test_errors(
    args: list[str], words: str, somewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *args]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("anchorprune: error: ")
    assert words in line
    assert not Path("explain.png").exists()


def test_bad_budget(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--budgets", "0"])
    assert "Budget '0' is not allowed" in capsys.readouterr().err


def test_scenes_bring_their_question() -> None:
    asked = read_asked("scene:3", None)
    assert asked.question == "what color is the circle?"
    assert read_asked("scene:3", "Why?").question == "Why?"
    assert asked.media.url.startswith("data:image/png;base64,")

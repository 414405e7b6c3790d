# SPDX-License-Identifier: Apache-2.0
"""The command without an engine: what it asks for, what it keeps, what it refuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from anchorprune_vllm.commands.eval import engine
from anchorprune_vllm.commands.eval.data import DataSet, load_data
from anchorprune_vllm.commands.eval.plan import Configuration
from anchorprune_vllm.commands.eval.vqa_data import Picture, Question
from anchorprune_vllm.commands.main import main
from anchorprune_vllm.methods.registry import Method


class FakeEngines:
    """In place of vLLM: answers "yes" unpruned, and "yes" to the first question alone pruned."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any] | None] = []
        self.options: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.stopped = 0
        self.fail_after: int | None = None
        self.refuses = ""
        self.fails_to_start = False

    def check_engine(
        self, model: str, settings: dict[str, Any] | None, options: dict[str, Any]
    ) -> None:
        if settings is not None and self.refuses:
            raise ValueError(self.refuses)

    @contextmanager
    def start_engine(
        self, model: str, settings: dict[str, Any] | None, options: dict[str, Any]
    ) -> Iterator[SimpleNamespace]:
        if self.fails_to_start:
            raise RuntimeError("no memory")
        self.started.append(settings)
        self.options.append(options)
        try:
            yield SimpleNamespace(settings=settings)
        finally:
            self.stopped += 1

    def ask_all(
        self, llm: Any, data: Any, configuration: Any, *, advance: Any, **options: Any
    ) -> tuple[list[str], float]:
        if self.fail_after == len(self.asked):
            raise KeyboardInterrupt
        self.asked.append((configuration.method, configuration.budget, options))
        advance(len(data.questions))
        count = len(data.questions)
        if configuration.budget is None:
            return ["yes"] * count, 100.0
        return ["yes", *["no"] * (count - 1)], 20.0


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    fake = FakeEngines()
    monkeypatch.setattr(engine, "start_engine", fake.start_engine)
    monkeypatch.setattr(engine, "ask_all", fake.ask_all)
    monkeypatch.setattr(engine, "check_engine", fake.check_engine)
    return fake


class FakeLLM:
    """Answers with the grey of the picture and the number of the request."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], Any, dict[str, Any]]] = []

    def chat(self, messages: list[Any], params: Any, **options: Any) -> list[Any]:
        self.calls.append((messages, params, options))
        found = []
        for (message,) in messages:
            image, text = message["content"]
            words = f"{image['image_pil'].getpixel((0, 0))[0]} {text['text']}"
            answer = SimpleNamespace(text=words)
            found.append(SimpleNamespace(outputs=[answer], prompt_token_ids=[0] * len(words)))
        return found


def shades() -> DataSet:
    """300 pictures with a question each but for the first, which has none, and the last."""

    def grey(value: int) -> Picture:
        asked = range(0 if value == 0 else 3 if value == 299 else 1)
        questions = tuple(Question(f"{value}.{n}?", ("a",), "all") for n in asked)
        return Picture(lambda: Image.new("RGB", (2, 2), (value % 256,) * 3), questions)

    return DataSet("shades", tuple(map(grey, range(300))))


@pytest.mark.parametrize("special", [False, True])
def test_each_question_goes_with_its_picture(special: bool) -> None:
    llm, data, steps = FakeLLM(), shades(), []
    answers, prompt_tokens = engine.ask_all(
        llm,
        data,
        Configuration("anchorprune", None, "none", "5%"),
        prompt="Q: {question} {",
        max_tokens=7,
        add_special_tokens=special,
        advance=steps.append,
    )
    expected = [f"{int(q.text.split('.')[0]) % 256} Q: {q.text} {{" for q in data.questions]
    assert answers == expected
    assert prompt_tokens == pytest.approx(sum(map(len, expected)) / len(expected))
    assert steps == [len(messages) for messages, _, _ in llm.calls] == [256, 45]
    for messages, params, options in llm.calls:
        assert (params.temperature, params.max_tokens) == (0, 7)
        assert options["mm_processor_kwargs"] == {"anchorprune": {"budget": "5%", "query": "none"}}
        assert options["tokenization_kwargs"] == {"add_special_tokens": special}
        assert [message["role"] for (message,) in messages] == ["user"] * len(messages)


def test_the_unpruned_model_is_asked_without_override() -> None:
    llm = FakeLLM()
    how = {"prompt": "{question}", "max_tokens": 7, "add_special_tokens": False}
    engine.ask_all(llm, shades(), Configuration("Full"), advance=lambda count: None, **how)
    assert {repr(options["mm_processor_kwargs"]) for _, _, options in llm.calls} == {"None"}


def test_perfect_relevance_is_told_before_each_question() -> None:
    """And is forgotten before a question that is about nothing."""
    model = SimpleNamespace(_pruner=SimpleNamespace(_method=Method(select=list)))
    told: list[tuple[str, Any]] = []

    class ToldLLM(FakeLLM):
        def apply_model(self, func: Any) -> None:
            func(model)

        def chat(self, messages: list[Any], params: Any, **options: Any) -> list[Any]:
            ((message,),) = messages  # one at a time
            told.append((message["content"][1]["text"], model._pruner._method.select.boxes))
            return super().chat(messages, params, **options)

    (data,) = load_data(["clutter"], 20)
    perfect = Configuration("perfect relevance", None, "turn", "8")
    steps: list[int] = []
    how = {"prompt": "{question}", "max_tokens": 7, "add_special_tokens": False}
    engine.ask_all(ToldLLM(), data, perfect, advance=steps.append, **how)
    assert told == [(question.text, question.about) for question in data.questions]
    assert {bool(boxes) for _, boxes in told} == {True, False}
    assert steps == [1] * 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in name, and two questions about each of two pictures."""
    (tmp_path / "model" / "clip").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    rows = []
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
        rows += [{"image": name, "question": f"{n}?", "answers": ["Yes"]} for n in range(2)]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path


def evaluate(folder: Path, *args: str) -> int:
    model, data, out = (str(folder / name) for name in ("model", "mine.jsonl", "out"))
    return main(["eval", model, "--data", data, "--out", out, *args])


def test_what_it_asks_and_writes(
    folder: Path, engines: FakeEngines, capsys: pytest.CaptureFixture[str]
) -> None:
    status = evaluate(
        folder,
        *("--methods", "anchorprune", "anchorprune:tau=0.1"),
        *("--budgets", "16", "8", "--query", "turn,none", "--positions", "compact", "native"),
        *("--dtype", "float32", "--engine-args", '{"max_num_seqs": 4}', "--max-tokens", "3"),
    )
    assert status == 0
    encoder = {"text_encoder": str(folder / "model" / "clip"), "budget": "100%"}
    assert engines.started == [
        None,
        *(
            {**encoder, "method": "anchorprune", "positions": place, **more}
            for place in ("compact", "native")
            for more in ({}, {"tau": 0.1})
        ),
    ]
    assert engines.stopped == 5
    assert engines.options == [{"dtype": "float32", "max_num_seqs": 4}] * 5
    assert len(engines.asked) == 1 + 2 * 2 * 2 * 2
    how = {"prompt": "{question}", "max_tokens": 3, "add_special_tokens": False}
    assert engines.asked[0] == ("Full", None, how)

    stored = json.loads((folder / "out" / "results.json").read_text())
    assert {run["method"]: run["accuracy"] for run in stored["runs"]} == {
        "Full": 1.0,
        "anchorprune": 0.25,
        "anchorprune:tau=0.1": 0.25,
    }
    assert {run["relative"] for run in stored["runs"]} == {100.0, 25.0}
    assert stored["commands"][0].startswith("anchorprune eval ")
    assert stored["settings"]["versions"].keys() >= {"vllm", "anchorprune-vllm"}
    table = (folder / "out" / "table.md").read_text()
    assert table.count("## ") == 4
    assert Image.open(folder / "out" / "accuracy.png").format == "PNG"
    printed = capsys.readouterr().out
    assert "anchorprune:tau=0.1, 8, query none, native positions: mine 25.0% [" in printed
    assert "Rel. = accuracy / accuracy of Full x 100" in " ".join(printed.split())


def test_a_second_run_starts_no_engine(folder: Path, engines: FakeEngines) -> None:
    assert evaluate(folder, "--budgets", "8,16") == 0
    before = (folder / "out" / "table.md").read_text()
    engines.started.clear()
    assert evaluate(folder, "--budgets", "8,16") == 0
    assert engines.started == []
    assert (folder / "out" / "table.md").read_text() == before


def test_results_beside_the_model_do_not_change_it(folder: Path, engines: FakeEngines) -> None:
    for budgets in ("8", "8,16"):
        assert evaluate(folder, "--out", str(folder / "model"), "--budgets", budgets) == 0
    assert [budget for _, budget, _ in engines.asked] == [None, "8", "16"]


def test_without_a_text_encoder_there_are_no_files_of_it(
    folder: Path, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the directory that the command is started in are none."""
    (folder / "model" / "clip").rmdir()
    monkeypatch.chdir(folder / "model")
    assert evaluate(folder) == 0
    settings = json.loads((folder / "out" / "results.json").read_text())["settings"]
    of_model, of_text_encoder = settings["model_files"]
    assert of_model is not None
    assert of_text_encoder is None


def test_more_budgets_are_added(folder: Path, engines: FakeEngines) -> None:
    assert evaluate(folder, "--budgets", "8,16") == 0
    engines.asked.clear()
    assert evaluate(folder, "--budgets", "16,32") == 0
    assert [(method, budget) for method, budget, _ in engines.asked] == [("anchorprune", "32")]
    stored = json.loads((folder / "out" / "results.json").read_text())
    assert [run["budget"] for run in stored["runs"]] == [None, "8", "16", "32"]
    assert len(stored["commands"]) == 2


def test_the_ceiling_is_for_data_that_knows_where_things_are(
    folder: Path,
    engines: FakeEngines,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")  # as it was, after this test
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION")
    args = ["--data", "clutter", "--limit", "20", "--budgets", "8", "--ceiling"]
    assert evaluate(folder, "--methods", "divprune", "anchorprune:tau=0.1", *args) == 0
    # Functions go to an engine in a process of its own.
    assert os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert engines.started[-1] == engines.started[-2]
    assert engines.started[-1]["tau"] == 0.1
    stored = json.loads((folder / "out" / "results.json").read_text())
    assert [(run["method"], run["data"]) for run in stored["runs"]] == [
        ("blind", "clutter"),
        *((method, data) for method in ("Full", "divprune") for data in ("mine", "clutter")),
        *(("anchorprune:tau=0.1", data) for data in ("mine", "clutter")),
        ("perfect relevance", "clutter"),
    ]
    engines.asked.clear()
    assert evaluate(folder, *args) == 0
    assert [method for method, *_ in engines.asked] == ["anchorprune"] * 2
    assert "3 of 5 runs are there already" in capsys.readouterr().out


def test_goes_on_where_it_was_stopped(
    folder: Path, engines: FakeEngines, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.fail_after = 2
    assert evaluate(folder, "--budgets", "8,16,32") == 130
    words = "anchorprune: stopped; the same command goes on from here"
    assert capsys.readouterr().err.splitlines()[-1] == words
    assert engines.stopped == len(engines.started) == 2
    engines.fail_after = None
    engines.asked.clear()
    engines.started.clear()
    assert evaluate(folder, "--budgets", "8,16,32") == 0
    assert "2 of 4 runs are there already" in capsys.readouterr().out
    assert len(engines.started) == 1
    assert [budget for _, budget, _ in engines.asked] == ["16", "32"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--limit", "2"], "limit 2000, now 2"),
        (["--max-tokens", "3"], "max_tokens 16, now 3"),
        (["--prompt", "{question} Short!"], "prompt '{question}', now '{question} Short!'"),
        (["--add-special-tokens"], "add_special_tokens False, now True"),
        (["--data", "scenes", "--limit", "2000"], "data ['mine'], now ['mine', 'scenes']"),
    ],
)
def test_other_settings_need_another_place(
    folder: Path,
    engines: FakeEngines,
    args: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluate(folder) == 0
    assert evaluate(folder, *args) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert "choose another --out" in line


def test_another_model_under_the_same_name(
    folder: Path, engines: FakeEngines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(folder) == 0
    (folder / "model" / "config.json").write_text("{} ")
    assert evaluate(folder) == 1
    assert "other files of the model" in capsys.readouterr().err


def test_guesses_have_a_row(folder: Path, engines: FakeEngines) -> None:
    assert evaluate(folder, "--data", "scenes", "--limit", "60") == 0
    stored = json.loads((folder / "out" / "results.json").read_text())
    (blind,) = (run for run in stored["runs"] if run["method"] == "blind")
    assert 0.2 < blind["accuracy"] < 0.9
    assert "| blind |" in (folder / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data", "nothing.jsonl"], "there is no file 'nothing.jsonl', nor such a set"),
        (["--prompt", "what?"], "the prompt 'what?' has no {question} in it"),
        (["--text-encoder", "./clip"], "there is no text encoder directory './clip'"),
        (["--out", "/proc/new"], "--out is /proc/new, and /proc cannot be written"),
        (["--ceiling"], "--ceiling: mine cannot tell where the things are that a question is"),
        (["--dtype", "half", "--engine-args", '{"dtype": "half"}'], "give one of them"),
    ],
)
def test_errors_come_before_the_engine(
    folder: Path,
    engines: FakeEngines,
    args: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluate(folder, *args) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("anchorprune: error: ")
    assert words in line
    assert engines.started == []
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("refuses", "anchorprune: that cannot be", "that cannot be"),
        ("fails_to_start", True, "no memory"),
    ],
)
def test_an_engine_that_does_not_start_leaves_nothing(
    folder: Path,
    engines: FakeEngines,
    attribute: str,
    value: Any,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    setattr(engines, attribute, value)
    assert evaluate(folder, "--data", "scenes") == 1
    assert capsys.readouterr().err == f"anchorprune: error: {words}\n"
    assert engines.started == []
    assert not (folder / "out").exists()


@pytest.mark.parametrize("package", ["matplotlib", "easy_vqa"])
def test_missing_packages_are_named_before_the_engine(
    folder: Path,
    engines: FakeEngines,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert evaluate(folder, "--data", "easy-vqa") == 1
    assert "pip install '.[eval]'" in capsys.readouterr().err
    assert engines.started == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nowhere", "there is no model directory"),
        ("a/b/c", "there is no model directory"),
        (".", "there is no config.json in it"),
    ],
)
def test_wrong_models(
    folder: Path, model: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(folder / model), "--data", str(folder / "mine.jsonl")]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--query", "turn,words"], "'words' is not one of turn, last, all, none"),
        (["--positions", "mine"], "'mine' is not one of compact, native"),
        (["--budgets", "0"], "Budget '0' is not allowed"),
        (["--limit", "some"], "--limit: 'some' is not a whole number"),
        (["--limit", "-1"], "--limit: '-1' is not a whole number of at least 1; 0 or all: all"),
    ],
)
def test_wrong_arguments(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "model", *args])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["0", "all"])
def test_no_limit(folder: Path, engines: FakeEngines, limit: str) -> None:
    assert evaluate(folder, "--limit", limit) == 0
    stored = json.loads((folder / "out" / "results.json").read_text())
    assert stored["settings"]["limit"] is None
    assert stored["data"]["mine"]["questions_per_picture"] == [2, 2]

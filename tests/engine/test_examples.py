# SPDX-License-Identifier: Apache-2.0
"""The examples as they stand: each a process, in an empty directory, without arguments."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anchorprune_vllm.commands.eval.clutter import cluttered_scene
from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE, scene
from anchorprune_vllm.testing.server import VllmServer
from tests.support.examples import Script, run_example

TIMEOUT = 300
SCENE_QUESTIONS = [q for q in scene(FIRST_TEST_SCENE).questions if q.kind != "yes/no"][:2]


def run(name: str, *args: str, directory: Path) -> str:
    """What it prints."""
    ended = run_example(name, *args, directory=directory, seconds=TIMEOUT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_offline(tmp_path: Path) -> None:
    printed = run("offline.py", directory=tmp_path)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed.splitlines()
        if line.startswith("│")
    ]
    *asked, (last, *tokens) = rows
    assert last == "prompt tokens, all"
    unpruned, many, few = map(int, tokens)
    assert (unpruned - many, many - few) == (6 * (256 - 64), 6 * (64 - 16))
    by_text = {
        (number, question.text): question.answers
        for number in range(6)
        for question in cluttered_scene(FIRST_TEST_SCENE + number).questions
    }
    assert len(asked) == 6
    # With all tokens the model knows most of these.
    right = [answer in by_text[number, text] for number, (text, answer, _, _) in enumerate(asked)]
    assert sum(right) >= 4


def test_video(tmp_path: Path) -> None:
    printed = run("video.py", directory=tmp_path)
    lines = re.findall(r"^budget (\S+): (\d+) prompt tokens\n  (.+)$", printed, re.MULTILINE)
    (_, unpruned, _), (_, pruned, _) = lines
    assert [budget for budget, *_ in lines] == ["100%", "64"]
    # 16 frames of 36 tokens with a newline behind each row of 6 in every frame, as its config says.
    assert int(unpruned) - int(pruned) == 16 * 6 * (6 + 1) - 64
    assert lines[0][2] != lines[1][2]


class ScriptServer(VllmServer):
    """examples/serve.sh instead of `vllm serve`, on a free port."""

    def __init__(self, log: Path) -> None:
        super().__init__("unused", [], log, start_seconds=TIMEOUT)
        script = Script("serve.sh", ["MODEL", "BUDGET", "VIDEO_BUDGET", "METHOD", "LISTEN", "PORT"])
        commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._command = [str(script.path)]
        self._env = script.environment(PORT=str(self.port), PATH=commands)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its base URL."""
    directory = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)  # where the model is made
        with ScriptServer(directory / "log") as running:
            yield f"{running.url}/v1"


def test_openai_client(server: str, tmp_path: Path) -> None:
    printed = run("openai_client.py", "--base-url", server, directory=tmp_path)
    told = re.findall(r"^(.+): (.+\?)\n  (.+)\n  (.+)$", printed, re.MULTILINE)
    first, second = SCENE_QUESTIONS
    own = "{'budget': '32'}"
    assert [(how, question) for how, question, *_ in told] == [
        ("plain", first.text),
        ("streaming", first.text),
        ("second turn", second.text),
        (own, first.text),
    ]
    assert [answer for _, _, answer, _ in told] == [
        *(first.answers[0], first.answers[0], second.answers[0], first.answers[0])
    ]
    kept = ["visual {'image': 16}"] * 3 + ["visual {'image': 32}"]
    assert [usage.split(", ")[1] for *_, usage in told] == kept
    tokens = [int(usage.split()[0]) for *_, usage in told]
    assert tokens[0] == tokens[1] == tokens[3] - 16 < tokens[2]


def test_openai_client_with_a_picture_and_words_of_the_users(server: str, tmp_path: Path) -> None:
    picture = tmp_path / "own.png"
    scene(FIRST_TEST_SCENE).load().save(picture)
    question = SCENE_QUESTIONS[0]
    args = ["--image", str(picture), "--question", question.text, "--query", "the letter"]
    printed = run("openai_client.py", "--base-url", server, *args, directory=tmp_path)
    assert f"plain: {question.text}\n  {question.answers[0]}\n" in printed
    assert "{'budget': '32', 'query': 'the letter'}: " in printed


def test_openai_client_says_what_the_server_refuses(server: str) -> None:
    ended = run_example("openai_client.py", "--base-url", server, "--budget", "0")
    assert ended.returncode == 1
    assert "the server refuses {'budget': '0'}: " in ended.stderr
    assert "Budget '0' is not allowed" in ended.stderr

# SPDX-License-Identifier: Apache-2.0
"""What the Python examples say before they start anything."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tests.support.examples import load_example, run_example


def test_help(subtests: pytest.Subtests) -> None:
    for name in ("offline.py", "openai_client.py", "video.py"):
        with subtests.test(name=name):
            ended = run_example(name, "--help")
            assert ended.returncode == 0, ended.stderr
            assert "Without arguments:" in ended.stdout
            assert "%%" not in ended.stdout


def test_refusals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    """In this process, which has imported vLLM already."""
    for command, words in (
        (
            ["offline.py", "--ask", "no.png", "What?"],
            "No such file or directory: 'no.png': give --ask a picture",
        ),
        (["offline.py", "--ask", __file__, "What?"], "give --ask a picture that Pillow can read"),
        (["offline.py", "--model", "org/model"], "give --ask IMAGE QUESTION"),
        (["offline.py", "--budgets", "0"], "Budget '0' is not allowed"),
        (["video.py", "no.mp4"], "there is no file no.mp4: give a video"),
        (["video.py", "--budgets", "16,200%"], "Budget '200%' is not allowed"),
        (["video.py", "--frames", "0"], "'0' is not a whole number of at least 1"),
        (["openai_client.py", "--image", "no.png"], "there is no file no.png: give a picture"),
    ):
        with subtests.test(command=command):
            monkeypatch.setattr("sys.argv", command)
            with pytest.raises(SystemExit) as ended:
                load_example(command[0]).main()
            assert ended.value.code == 2
            assert words in capsys.readouterr().err


def test_a_server_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked past the proxy, which would not know a server on this machine."""

    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401, "no such key")

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with HTTPServer(("127.0.0.1", 0), Refusal) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        ended = run_example("openai_client.py", "--base-url", url)
        server.shutdown()
    assert ended.returncode == 1
    assert f"the server at {url} answers 401: " in ended.stderr
    assert "see --base-url, --api-key and --model" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_server() -> None:
    ended = run_example("openai_client.py", "--base-url", "http://127.0.0.1:9/v1")
    assert ended.returncode == 1
    assert (
        "no server answers at http://127.0.0.1:9/v1: start one (examples/serve.sh" in ended.stderr
    )
    assert "Traceback" not in ended.stderr

# SPDX-License-Identifier: Apache-2.0
"""examples/eval_lmms.sh: what it would run, and how it does, with stand-ins for both commands."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

import anchorprune_vllm
from tests.support.cli_args import make_arg_parser
from tests.support.examples import Script, load_example

lmms_table = load_example("lmms_table.py")
SCORES = lmms_table.SCORES
MODELS = {
    "llava-1.5": "llava-hf/llava-1.5-7b-hf",
    "llava-next": "llava-hf/llava-v1.6-vicuna-7b-hf",
    "qwen2.5-vl": "Qwen/Qwen2.5-VL-7B-Instruct",
    "llava-video": "lmms-lab/LLaVA-Video-7B-Qwen2",
}
OURS = [
    *("MODEL", "BUDGETS", "METHODS", "TASKS", "OUT", "LIMIT", "CONCURRENT", "PORT", "START"),
    *("VLLM", "LMMS_EVAL", "PYTHON"),
]
JUDGE = ["OPENAI_API_KEY", "AZURE_API_KEY"]
SCRIPT = Script("eval_lmms.sh", [*OURS, *JUDGE])


def test_bash_can_read_it() -> None:
    subprocess.run(["bash", "-n", SCRIPT.path], check=True)


def test_help() -> None:
    ended = SCRIPT.run("--help")
    assert ended.returncode == 0
    assert all(f"  {name}" in ended.stdout or f", {name}" in ended.stdout for name in OURS)


def test_errors(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """And nothing is written, which another try would have to agree with."""
    for args, variables, words in (
        (["--budget", "64"], {}, "unknown argument '--budget'; flags of vllm serve go behind --"),
        ([], {"LIMIT": "few"}, "LIMIT is 'few': give a positive whole number"),
        ([], {"PORT": "0"}, "PORT is '0'"),
        ([], {"BUDGETS": "64 none"}, "BUDGETS has 'none': give numbers or shares"),
        ([], {"TASKS": ""}, "TASKS is empty"),
        ([], {"MODEL": "org/other", "TASKS": "gqa"}, "the paper has no table for 'org/other'"),
        ([], {"LMMS_EVAL": "no-such-lmms"}, "there is no 'no-such-lmms': pip install lmms-eval"),
        ([], {"LMMS_EVAL": "true", "VLLM": "no-such-vllm"}, "there is no 'no-such-vllm'"),
    ):
        with subtests.test(args=args, variables=variables):
            ended = SCRIPT.run(*args, **{"OUT": str(tmp_path / "out"), **variables})
            assert ended.returncode == 2
            assert words in ended.stderr
            assert not (tmp_path / "out").exists()


def test_budgets_and_tasks_are_the_papers(subtests: pytest.Subtests) -> None:
    for family in MODELS:
        with subtests.test(family=family):
            paper = json.loads(lmms_table.PAPER.read_text(encoding="utf-8"))["models"][family]
            commands = SCRIPT.dry_run(MODEL=MODELS[family], OUT="out", OPENAI_API_KEY="judge")
            serves = [command for command in commands if command[:2] == ["vllm", "serve"]]
            assert {command[2] for command in serves} == {MODELS[family]}
            budgets = [
                command[command.index("--anchorprune-budget") + 1]
                if "--anchorprune-budget" in command
                else None
                for command in serves
            ]
            assert budgets == [None, *paper["budgets"]]
            asked = [command for command in commands if command[0] == "lmms-eval"]
            tasks = [command[command.index("--tasks") + 1] for command in asked]
            per_run = len(tasks) // len(serves)
            assert tasks == tasks[:per_run] * len(serves)
            assert {SCORES[task].column for task in tasks} == {*paper["columns"]}
            assert commands[-1][-3:] == ["out", "--paper", family]


def test_vllm_has_every_flag(subtests: pytest.Subtests) -> None:
    for family in MODELS:
        with subtests.test(family=family):
            anchorprune_vllm.register()
            parser = make_arg_parser(FlexibleArgumentParser())
            for command in SCRIPT.dry_run(
                "--", "--enforce-eager", MODEL=MODELS[family], BUDGETS="64 10%"
            ):
                if command[0] == "vllm":
                    args = parser.parse_args(command[2:])
                    assert args.served_model_name == ["served"]
                    assert args.enforce_eager
                    assert args.trust_request_mm_kwargs == (family == "llava-video")
                    if family == "llava-video":
                        assert args.hf_overrides["mm_spatial_pool_mode"] == "average"


def test_judged_tasks_are_left_out_without_a_judge() -> None:
    ended = SCRIPT.run("--dry-run")
    assert "Left out: mmvet" in ended.stderr
    assert "mmvet" not in ended.stdout
    assert " mmvet " in SCRIPT.run("--dry-run", TASKS="gqa mmvet").stdout  # asked for by name


def test_variables_reach_the_commands() -> None:
    serve, ask, *_ = SCRIPT.dry_run(
        *("--", "--hf-overrides", '{"a": 1}'),
        **{"MODEL": "some/model", "BUDGETS": "", "TASKS": "gqa", "LIMIT": "7", "PORT": "1234"},
        CONCURRENT="3",
    )
    assert serve[-2:] == ["--hf-overrides", '{"a": 1}']
    assert ask[ask.index("--limit") + 1] == "7"
    client = ask[ask.index("--model_args") + 1].split(",")
    assert {"base_url=http://127.0.0.1:1234/v1", "num_concurrent=3"} <= {*client}


FAKE_VLLM = """
import http.server, json, sys
if "--die" in sys.argv:
    sys.exit("no such model")
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
# Answers by task: one fails on a question, one writes nothing, one takes for ever.
FAKE_LMMS_EVAL = """
import json, pathlib, sys, time
task = sys.argv[sys.argv.index("--tasks") + 1]
out = pathlib.Path(sys.argv[sys.argv.index("--output_path") + 1], "served")
if task == "slow":
    time.sleep(600)
if task == "silent":
    sys.exit()
out.mkdir(parents=True)
metrics = {"exact_match,none": 0.5, "mme_perception_score,none": 1000}
content = {"results": {task: metrics}, "n-samples": {task: {"original": 2, "effective": 2}}}
(out / "1_results.json").write_text(json.dumps(content))
answer = "[LMMS_EVAL_REQUEST_FAILED after 5 retries]" if task == "mme" else "yes"
(out / f"1_samples_{task}.jsonl").write_text(json.dumps({"resps": answer}) + chr(10))
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    for name, source in (("vllm", FAKE_VLLM), ("lmms", FAKE_LMMS_EVAL)):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{source}")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "VLLM": str(tmp_path / "vllm"),
        "LMMS_EVAL": str(tmp_path / "lmms"),
        "PYTHON": sys.executable,
        "OUT": str(tmp_path / "out"),
        "PORT": str(port),
        "MODEL": "some/model",
        "BUDGETS": "16",
    }


def left_running(stand_ins: dict[str, str]) -> list[str]:
    found = [
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    ]
    return [command for command in found if stand_ins["VLLM"] in command]


def test_a_run_and_the_same_command_again(stand_ins: dict[str, str]) -> None:
    first = SCRIPT.run(**stand_ins, TASKS="gqa")
    assert first.returncode == 0, first.stderr
    assert "| 16 | anchorprune | 50.0 | 100.0 | – |" in first.stdout
    out = Path(stand_ins["OUT"])
    assert "--anchorprune-budget 16" in (out / "anchorprune-16" / "server.txt").read_text()
    assert "--anchorprune-budget" not in (out / "full" / "server.txt").read_text()
    assert (out / "table.md").read_text() in first.stdout
    assert left_running(stand_ins) == []
    second = SCRIPT.run(**stand_ins, TASKS="gqa")
    assert second.returncode == 0
    assert second.stdout.count("all there") == 2
    assert "vllm serve" not in second.stdout
    assert SCRIPT.run("--dry-run", **stand_ins, TASKS="gqa pope").stdout.count("--tasks") == 2


def test_results_of_other_settings_are_not_taken_for_these(stand_ins: dict[str, str]) -> None:
    assert SCRIPT.run(**stand_ins, TASKS="gqa", LIMIT="3").returncode == 0
    for args, variables in (([], {}), (["--", "--dtype", "half"], {"LIMIT": "3"})):
        ended = SCRIPT.run(*args, **stand_ins, TASKS="gqa", **variables)
        assert ended.returncode == 2
        assert "results of other settings" in ended.stderr
    assert SCRIPT.run(**stand_ins, TASKS="gqa", LIMIT="3").returncode == 0


def test_failures_are_no_results_and_do_not_stop_the_rest(stand_ins: dict[str, str]) -> None:
    ended = SCRIPT.run(**stand_ins, TASKS="mme silent gqa")
    assert ended.returncode == 1
    assert "mme failed" in ended.stderr
    assert "silent failed" in ended.stderr
    full = Path(stand_ins["OUT"]) / "full"
    assert sorted(path.name for path in full.iterdir() if path.is_dir()) == [
        ".mme",
        ".silent",
        "gqa",
    ]
    assert "| 16 | anchorprune | 50.0 | 100.0 | – |" in ended.stdout
    assert left_running(stand_ins) == []


def test_a_server_that_ends_is_said(stand_ins: dict[str, str]) -> None:
    ended = SCRIPT.run("--", "--die", **stand_ins, TASKS="gqa")
    assert ended.returncode == 2
    assert "no such model" in ended.stderr
    assert "vllm serve ended; its last lines are above" in ended.stderr


def test_a_taken_port_is_said(stand_ins: dict[str, str]) -> None:
    with subprocess.Popen([stand_ins["VLLM"], "--port", stand_ins["PORT"]]) as other:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", int(stand_ins["PORT"]))) == 0:
                        break
                time.sleep(0.05)
            ended = SCRIPT.run(**stand_ins, TASKS="gqa")
        finally:
            other.kill()
    assert ended.returncode == 2
    assert "answers on port" in ended.stderr


def test_interrupted_it_leaves_nothing_running(stand_ins: dict[str, str]) -> None:
    process = subprocess.Popen(
        [SCRIPT.path],
        env=SCRIPT.environment(**stand_ins, TASKS="slow"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = Path(stand_ins["OUT"]) / "full" / ".slow" / "log"
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    psutil.wait_procs(started, timeout=60)
    assert [child for child in started if child.is_running()] == []

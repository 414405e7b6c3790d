# SPDX-License-Identifier: Apache-2.0
"""`anchorprune check`: what it finds on this machine, and that it notices what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from httpx import Request
from openai import APIConnectionError

from anchorprune_vllm.commands import main
from anchorprune_vllm.commands.check import command, kernels, machine, servers
from anchorprune_vllm.commands.check.findings import Finding
from anchorprune_vllm.commands.check.servers import Token, Variant
from anchorprune_vllm.selection import Candidates, KeptTokens
from anchorprune_vllm.selection.anchorprune import contextual_expansion
from anchorprune_vllm.selection.scores import Score
from anchorprune_vllm.vllm_patches import hooks
from anchorprune_vllm.vllm_patches.hooks import Hook

CPU = torch.device("cpu")
SIZES = ((1, 8), (40, 16), (130, 24))


def by_name(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


def test_choices_are_right_here() -> None:
    found = by_name(list(kernels.check_choices(CPU, SIZES)))
    assert found == {"anchors": "skipped", "expansion": "ok", "batches": "ok"}


def test_a_wrong_choice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_weight(
        features: object, score: Score, anchor: torch.Tensor, budget: int
    ) -> torch.Tensor:
        weight = score.weight.masked_fill(anchor, torch.inf)
        return weight.argsort(descending=True)[:budget]

    monkeypatch.setattr(kernels, "expand_item", by_weight)
    (finding,) = [f for f in kernels.check_choices(CPU, SIZES) if f.name == "expansion"]
    assert finding.status == "FAILED"
    assert "below the best one" in finding.found
    assert "leave out --anchorprune-budget" in finding.advice


def test_regret() -> None:
    features, weight = torch.eye(4), torch.tensor([1.0, 0.5, 0.75, 0.25])
    anchor = torch.tensor([False, False, False, True])
    best = contextual_expansion(features, Score(weight.double()), anchor, 3)
    assert best.tolist() == [3, 0, 2]
    assert kernels.regret(features, weight, anchor, best) == 0
    # The distance of all is 1: instead of 0.75, one with 0.5 was taken.
    assert kernels.regret(features, weight, anchor, torch.tensor([3, 0, 1])) == pytest.approx(0.25)
    assert kernels.regret(features, weight, anchor, torch.tensor([0, 3, 2])) == float("inf")


def test_a_hook_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name(list(machine.check_vllm())) == {"vLLM's hooks": "ok"}
    gone = Hook("pruner.py", "gone", "for this test", "vllm.config:NothingOfThisName")
    monkeypatch.setattr(hooks, "HOOKS", [*hooks.HOOKS, gone])
    (finding,) = machine.check_vllm()
    assert finding.status == "FAILED"
    assert "vllm.config:NothingOfThisName" in finding.found


@pytest.mark.parametrize(("measured", "status"), [(1.0, "ok"), (2.9, "ok"), (3.1, "FAILED")])
def test_slow_choosing_is_found(
    measured: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"choice": "an image", "measured ms": measured, "computed ms": 1.0}
    monkeypatch.setattr(machine, "measure_times", lambda device: [row])
    times: list[machine.Times] = []
    (finding,) = machine.check_speed(CPU, times)
    assert finding.status == status
    assert times == [row]


A, B = Token("a", -0.5), Token("b", -1.0)


@pytest.mark.parametrize(
    ("answer", "is_same"),
    [
        ([A, B], True),
        ([A, Token("b", -1.01)], True),
        ([A, Token("b", -1.1)], False),
        ([A, Token("c", -1.01)], True),  # a tie
        ([A, Token("c", -2.0)], False),
        ([A], False),
    ],
)
def test_answers_are_compared_up_to_ties(answer: list[Token], is_same: bool) -> None:
    assert servers.same_answer(answer, [A, B]) is is_same


def test_servers_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, compiled = Variant(1, "eager"), Variant(1, "compiled")
    monkeypatch.setattr(servers.shutil, "which", lambda name: None)
    assert "C++" in servers.why_not(compiled, CPU)
    assert servers.why_not(eager, CPU) == ""
    assert "GPU" in servers.why_not(Variant(2, "eager"), CPU)
    assert servers.why_not(Variant(2, "eager"), torch.device("cuda")) == ""


def test_servers_are_held_to_the_eager_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = {"eager": [[A, B]], "compiled": [[A, Token("c", -3.0)]]}
    monkeypatch.setattr(servers, "make_trained_model", lambda *args, **kwargs: None)
    monkeypatch.setattr(
        servers, "_answers", lambda model, arch, variant, log: answers[str(variant).split()[-1]]
    )
    monkeypatch.setattr(servers, "why_not", lambda variant, device: "")
    found = by_name(list(servers.check_servers(CPU, tmp_path)))
    assert found["llava-1.5: runner V1, eager"] == found["llava-1.5: runner V2, eager"] == "ok"
    assert (
        found["llava-1.5: runner V1, compiled"]
        == found["qwen2.5-vl: runner V2, compiled"]
        == "FAILED"
    )


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("vllm serve ended with code 1; the end of it:\nTraceback"), "code 1"),
        (APIConnectionError(request=Request("POST", "http://localhost")), "Connection error"),
    ],
)
def test_a_server_that_fails_is_one_line(
    error: Exception, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the others are not compared with each other instead."""

    def dies(*args: object) -> None:
        raise error

    monkeypatch.setattr(servers, "make_trained_model", lambda *args, **kwargs: None)
    monkeypatch.setattr(servers, "_answers", dies)
    monkeypatch.setattr(servers, "why_not", lambda variant, device: "")
    finding, *others = servers.check_servers(CPU, tmp_path)
    assert finding.status == "FAILED"
    assert found in finding.found
    assert str(tmp_path) in finding.found
    assert "\n" not in finding.found
    assert str(error) in finding.details
    assert [other.status for other in others[:3]] == ["skipped"] * 3


def test_an_empty_answer_is_no_answer() -> None:
    choice = SimpleNamespace(logprobs=SimpleNamespace(content=[]))
    client = mock.Mock()
    client.chat.completions.create.return_value = SimpleNamespace(choices=[choice])
    with pytest.raises(RuntimeError, match="without a token"):
        servers._answer(client, mock.Mock())


def test_numbers_that_are_none_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "runs_triton", lambda device: True)
    (finding,) = kernels.check_received_attention(CPU)
    assert finding.status == "ok"
    monkeypatch.setattr(
        kernels, "received_attention", lambda query, *rest: torch.full(query.shape[:1], torch.nan)
    )
    (finding,) = kernels.check_received_attention(CPU)
    assert finding.status == "FAILED"


def test_a_batch_that_changes_a_choice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_batch(items: list[Candidates], params: object) -> list[KeptTokens]:
        return [KeptTokens(torch.tensor([len(items)]), torch.tensor([False])) for _ in items]

    monkeypatch.setattr(kernels, "select_batch", by_batch)
    found = {f.name: f.status for f in kernels.check_choices(CPU, SIZES[:1])}
    assert found["batches"] == "FAILED"


@pytest.mark.parametrize("error", [ValueError("no [/such] tile"), RuntimeError("CUDA error")])
def test_an_error_in_one_part_is_in_the_report(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kernels, "check_choices", mock.Mock(side_effect=error))
    monkeypatch.setattr(machine, "measure_times", lambda device: [])
    report = tmp_path / "report.json"
    assert main.main(["check", "--no-servers", "--json", str(report)]) == 1
    out, _ = capsys.readouterr()
    assert str(error) in out
    found = {each["name"]: each for each in json.loads(report.read_text())["findings"]}
    assert found["kernels"]["status"] == "FAILED"
    assert "Traceback" in found["kernels"]["details"]
    assert found["vLLM's hooks"]["status"] == "ok"
    assert found["time of choosing"]["status"] == "skipped"


@pytest.mark.parametrize("status", ["ok", "FAILED"])
def test_command(
    status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding("kernels", status, "seen", "Do this." if status == "FAILED" else "")
    times = [{"choice": "an image", "measured ms": 1.0}]

    def findings(args: object, device: object, measured: list[machine.Times]) -> list[Finding]:
        measured += times
        return [finding]

    monkeypatch.setattr(command, "_findings", findings)
    report = tmp_path / "report.json"
    assert main.main(["check", "--json", str(report)]) == (status == "FAILED")
    out, err = capsys.readouterr()
    written = json.loads(report.read_text())
    assert written["times"] == times
    assert written["findings"][-1]["status"] == status
    assert written["machine"]["vllm"]
    if status == "FAILED":
        assert "Do this." in out
        assert "1 of 1 checks failed" in err
    else:
        assert "Nothing failed; 0 of 1 were skipped" in out

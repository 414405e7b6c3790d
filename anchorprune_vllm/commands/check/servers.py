# SPDX-License-Identifier: Apache-2.0
"""Serve tiny models as a user would, and compare their answers with those of an eager server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from openai import OpenAI, OpenAIError

from anchorprune_vllm.commands.asking import connect
from anchorprune_vllm.commands.check.findings import SEND_REPORT, Finding
from anchorprune_vllm.commands.demo.questions import DemoQuestion, questions_for
from anchorprune_vllm.testing.demo_models.make import TRAINED, make_trained_model, pruning_flags
from anchorprune_vllm.testing.server import VllmServer, tail

_QUESTIONS = 4
_TOLERANCE = 0.02  # of log-probabilities, as other kernels round in another way
_ADVICE = (
    "Serve in a way that is ok here: with --enforce-eager, or with the other runner "
    f"(VLLM_USE_V2_MODEL_RUNNER=0 or 1). {SEND_REPORT}."
)


class Variant(NamedTuple):
    """A way to run the engine."""

    runner: int
    mode: str

    def __str__(self) -> str:
        return f"runner V{self.runner}, {self.mode}"


FIRST, *OTHERS = [Variant(runner, mode) for runner in (1, 2) for mode in ("eager", "compiled")]


class Token(NamedTuple):
    """A token of an answer."""

    text: str
    logprob: float


def check_servers(device: torch.device, directory: Path) -> Iterator[Finding]:
    """Serve each trained model in each way that this machine supports."""
    for arch in TRAINED:
        make_trained_model(directory / f"trained-{arch}", arch)
        expected = None
        for variant in (FIRST, *OTHERS):
            name = f"{arch}: {variant}"
            reason = why_not(variant, device)
            if not reason and variant != FIRST and expected is None:
                reason = f"nothing to compare with, as {FIRST} failed"
            if reason:
                yield Finding(name, "skipped", reason)
                continue
            log = directory / f"{arch}-v{variant.runner}-{variant.mode}.log"
            try:
                answers = _answers(directory / f"trained-{arch}", arch, variant, log)
            except (RuntimeError, OpenAIError) as error:
                found = str(error).splitlines()[0].partition(";")[0]
                end = tail(log) if log.exists() else ""
                yield Finding(name, "FAILED", f"{found} (log: {log})", _ADVICE, f"{error}\n{end}")
                continue
            if expected is None:
                expected = answers
                found = f"{len(answers)} answers, to which the others are compared"
                yield Finding(name, "ok", found)
                continue
            differ = sum(not same_answer(*pair) for pair in zip(answers, expected, strict=True))
            problem = f"{differ} of {len(answers)} answers are not the eager ones"
            found = f"{len(answers)} answers as the eager ones"
            yield Finding.of(name, problem if differ else "", _ADVICE, found)


def why_not(variant: Variant, device: torch.device) -> str:
    """Return why this machine cannot run the engine so; "" if it can."""
    if device.type == "cpu" and variant.runner == 2:
        return "vLLM's second model runner needs a GPU"
    if variant.mode == "compiled" and not (shutil.which("c++") or shutil.which("g++")):
        return "compiling needs a C++ compiler (package g++)"
    return ""


def _answers(model: Path, arch: str, variant: Variant, log: Path) -> list[list[Token]]:
    flags = [
        *("--anchorprune-budget", "16", "--served-model-name", "tiny", "--dtype", "float32"),
        *pruning_flags(model, TRAINED[arch]),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", "128M"),
        *(["--enforce-eager"] if variant.mode == "eager" else []),
    ]
    env = {"VLLM_USE_V2_MODEL_RUNNER": str(variant.runner - 1)}
    with VllmServer(model, flags, log, env=env) as server:
        client, question = connect(server.url), questions_for(arch)
        return [_answer(client, question(number)) for number in range(_QUESTIONS)]


def _answer(client: OpenAI, asked: DemoQuestion) -> list[Token]:
    content = [asked.media.as_message_part(), {"type": "text", "text": asked.text}]
    found = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        max_tokens=6,
        temperature=0,
        logprobs=True,
    )
    logprobs = found.choices[0].logprobs
    tokens = logprobs.content if logprobs else None
    if not tokens:
        raise RuntimeError("the server gave an answer without a token")
    return [Token(each.token, each.logprob) for each in tokens]


def same_answer(answer: Sequence[Token], expected: Sequence[Token]) -> bool:
    """Return whether the tokens are the same; what follows a near-tie does not count."""
    for one, other in zip(answer, expected, strict=False):
        if abs(one.logprob - other.logprob) > _TOLERANCE:
            return False
        if one.text != other.text:
            return True
    return len(answer) == len(expected)

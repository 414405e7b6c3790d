# SPDX-License-Identifier: Apache-2.0
"""Servers of tiny models, as a user would start them; answers against those of an eager one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from openai import OpenAI, OpenAIError

from anchorprune_vllm.commands.asking import connect
from anchorprune_vllm.commands.check.findings import Finding
from anchorprune_vllm.commands.demo.questions import DemoQuestion, questions_for
from anchorprune_vllm.testing.demo_models.make import TRAINED, make_trained_model, pruning_flags
from anchorprune_vllm.testing.server import VllmServer, tail

_QUESTIONS = 4
_TOLERANCE = 0.02
"""Of a log-probability: other kernels round in another way."""
_ADVICE = (
    "Serve in a way that is ok here: with --enforce-eager, or with the other runner "
    "(VLLM_USE_V2_MODEL_RUNNER=0 or 1). Please send the report of --json."
)


class Variant(NamedTuple):
    """A way to run the engine."""

    runner: int
    is_eager: bool

    def __str__(self) -> str:
        kind = "eager" if self.is_eager else "compiled"
        return f"runner V{self.runner}, {kind}"


VARIANTS = [Variant(runner, eager) for runner in (1, 2) for eager in (True, False)]
"""The first is the one that the others are held to."""


class Token(NamedTuple):
    """A token of an answer."""

    text: str
    logprob: float


def check_servers(device: torch.device, directory: Path) -> Iterator[Finding]:
    """Serve each trained model in each way that this machine has."""
    for arch in TRAINED:
        model = directory / f"trained-{arch}"
        make_trained_model(model, arch)
        expected = None
        for variant in VARIANTS:
            name = f"{arch}: {variant}"
            is_first = variant == VARIANTS[0]
            reason = why_not(variant, device)
            if not reason and not is_first and expected is None:
                reason = f"nothing to compare with, as {VARIANTS[0]} failed"
            if reason:
                yield Finding(name, "skipped", reason)
                continue
            kind = "eager" if variant.is_eager else "compiled"
            log = directory / f"{arch}-v{variant.runner}-{kind}.log"
            try:
                answers = _answers(model, arch, variant, log)
            except (RuntimeError, OpenAIError) as error:
                yield _failed(name, error, log)
                continue
            if is_first:
                expected = answers
                yield Finding(name, "ok", f"{len(answers)} answers; what the others are held to")
            else:
                assert expected is not None
                yield _compared(name, answers, expected)


def _failed(name: str, error: Exception, log: Path) -> Finding:
    found = str(error).splitlines()[0].partition(";")[0]
    end = tail(log) if log.exists() else ""
    return Finding(name, "FAILED", f"{found} (log: {log})", _ADVICE, f"{error}\n{end}")


def why_not(variant: Variant, device: torch.device) -> str:
    """Return why this machine cannot run the engine so; "" if it can."""
    if device.type == "cpu" and variant.runner == 2:
        return "vLLM's second model runner needs a GPU"
    if not variant.is_eager and shutil.which("c++") is None and shutil.which("g++") is None:
        return "compiling needs a C++ compiler (package g++)"
    return ""


def _answers(model: Path, arch: str, variant: Variant, log: Path) -> list[list[Token]]:
    flags = [
        *("--anchorprune-budget", "16", "--served-model-name", "tiny", "--dtype", "float32"),
        *pruning_flags(model, TRAINED[arch]),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", "128M"),
        *(["--enforce-eager"] if variant.is_eager else []),
    ]
    env = {"VLLM_USE_V2_MODEL_RUNNER": str(variant.runner - 1)}
    with VllmServer(model, flags, log, env=env) as server:
        client = connect(server.url)
        question = questions_for(arch)
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
    assert logprobs is not None
    tokens = [Token(each.token, each.logprob) for each in logprobs.content or ()]
    if not tokens:
        raise RuntimeError("the server gave an answer without a token")
    return tokens


def _compared(
    name: str, answers: Sequence[list[Token]], expected: Sequence[list[Token]]
) -> Finding:
    differ = sum(not same_answer(*pair) for pair in zip(answers, expected, strict=True))
    if not differ:
        return Finding(name, "ok", f"{len(answers)} answers as the eager ones")
    found = f"{differ} of {len(answers)} answers are not the eager ones"
    return Finding(name, "FAILED", found, _ADVICE)


def same_answer(answer: Sequence[Token], expected: Sequence[Token]) -> bool:
    """Return whether tokens are the same, up to a tie; what comes after a tie counts no more."""
    for one, other in zip(answer, expected, strict=False):
        if abs(one.logprob - other.logprob) > _TOLERANCE:
            return False
        if one.text != other.text:
            return True
    return len(answer) == len(expected)

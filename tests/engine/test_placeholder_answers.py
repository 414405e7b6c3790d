# SPDX-License-Identifier: Apache-2.0
"""Answers that hold ids of placeholders, and are computed again after a preemption."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.engine import generate, request
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference


def log_probabilities(outputs: list[Any]) -> list[list[float]]:
    """Of each answer's tokens."""
    return [
        [given[token].logprob for token, given in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


@pytest.mark.parametrize("any_model", ["llava-1.5", "qwen2.5-vl"], indirect=True)
def test_positions_of_an_answer_do_not_depend_on_its_tokens(
    native: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that lose their KV cache go on as those do that are alone."""
    preempted = []
    preempt = Scheduler._preempt_request

    def count(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        preempted.append(1)
        preempt(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", count)
    # Nothing but placeholders, and one other token, so that log-probabilities say something.
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        ignore_eos=True,
        logprobs=0,
        allowed_token_ids=[5, *reference.placeholder_ids()],
        logit_bias=dict.fromkeys(reference.placeholder_ids(), 3.0),
    )
    many = {"budget": 70}  # so that few requests fill the KV cache
    prompts = [request(QUESTIONS[i], picture(780 + i), override=many) for i in range(6)]
    alone = [generate(native, prompt, params=params)[0] for prompt in prompts]
    assert not preempted
    native.reset_prefix_cache()
    together = generate(native, *prompts, params=params)
    assert preempted, "a request must have started again for this to show"
    assert any(reference.placeholder_ids()[0] in output.outputs[0].token_ids for output in together)
    for given, expected in zip(log_probabilities(together), log_probabilities(alone), strict=True):
        assert given == pytest.approx(expected, abs=1e-3)

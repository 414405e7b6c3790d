# SPDX-License-Identifier: Apache-2.0
"""What vLLM would refuse is refused before it starts, and in words."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from anchorprune_vllm.commands.checks import check_engine_options, refusal
from anchorprune_vllm.commands.eval.engine import check_engine


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float99"}, "dtype is 'float99': give one of auto, half, float16, bfloat16, fl"),
        ({"dtype": 16}, "dtype is 16: give one of"),
        (
            {"max_num_seq": 2},
            "has 'max_num_seq', which vLLM does not know: did you mean max_num_se",
        ),
        ({"fnord": 2}, "--engine-args has 'fnord', which vLLM does not know: The names are those"),
        ({"model": "m"}, "--engine-args has a model: give it as the first argument instead"),
        ({"hf_overrides": 3}, "hf_overrides is 3: give a JSON object"),
        (
            {"hf_overrides": {"anchorprune": {"budget": 8}}},
            "hf_overrides has 'anchorprune': {'budget': 8}. Settings .* such as --methods, --budg",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_engine_options(options)


def test_right_options() -> None:
    check_engine_options({"dtype": "half", "max_num_seqs": 2, "hf_overrides": {"a": 1}})
    check_engine_options({"chat_template": "{}"}, also=["chat_template"])


SETTINGS = {"budget": "100%", "method": "anchorprune"}


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        (None, {"max_model_len": 10**6}, r'and {"max_model_len": 1000000}: User-specified max_mod'),
        (None, {"max_model_len": "long"}, "max_model_len is 'long': Input should be a valid integ"),
        (None, {"max_num_sqs": 1}, "which vLLM does not know"),
        ({"text_encoder": "MODEL"}, {}, "the text encoder '.*' is a 'llava' model"),
        ({"method": "scope", "method_options": {"alpha": "x"}}, {}, "the method scope fails on"),
    ],
)
def test_engines_that_would_not_start(
    demo_model: Path, settings: dict[str, Any] | None, options: dict[str, Any], words: str
) -> None:
    if settings is not None:
        given = {"text_encoder": str(demo_model / "clip"), **SETTINGS, **settings}
        settings = {k: str(demo_model) if v == "MODEL" else v for k, v in given.items()}
    with pytest.raises(ValueError, match=words) as error:
        check_engine(str(demo_model), settings, options)
    assert "pydantic" not in str(error.value)
    assert "\n" not in str(error.value)


def test_an_engine_that_would(
    demo_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is said about it."""
    log = logging.getLogger("vllm")
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "level", logging.WARNING)
    settings = {"text_encoder": str(demo_model / "clip"), **SETTINGS}
    for each in (None, settings):
        check_engine(str(demo_model), each, {"max_num_seqs": 4, "chat_template": "{}"})
    assert caplog.text == ""
    assert log.level == logging.WARNING


def test_other_errors_keep_their_words() -> None:
    assert refusal(OSError("no such model")) == "no such model"
    assert refusal(ValueError("anchorprune: tau is high")) == "tau is high"

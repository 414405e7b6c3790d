# SPDX-License-Identifier: Apache-2.0
"""What processor and model log at start-up, each in a process of its own."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest

from anchorprune_vllm.logger import logger
from anchorprune_vllm.tools.local_model import LocalModel
from tests.support.dialects import in_dialect, prompt_of
from tests.support.pictures import picture


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """Those of our logger; in one process, vLLM would drop the second of two equal lines."""
    every_time = partial(logging.Logger.info, stacklevel=3)
    monkeypatch.setattr("vllm.logger._print_info_once", lambda *args: every_time(*args))
    seen: list[logging.LogRecord] = []
    monkeypatch.setattr(logger, "handle", seen.append)
    return seen


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("method", ["anchorprune", "hiprune", "cdpruner"])
def test_both_say_the_same_and_where(
    any_model: Path, records: list[logging.LogRecord], method: str
) -> None:
    loaded = LocalModel(any_model, settings={"method": method})
    prompt = in_dialect(prompt_of("Why?"), loaded.processor.info.get_tokenizer())
    loaded.process(prompt, picture(1), budget=16)
    of_model, of_processor = (r for r in records if "AnchorPrune is active" in r.getMessage())
    assert of_model.getMessage() == of_processor.getMessage()
    assert f"method {method} keeps 16 visual tokens per item" in of_model.getMessage()
    is_none = of_model.getMessage().endswith("text encoder none")
    assert is_none == (method == "hiprune")
    assert of_model.filename in ("paired_tower.py", "general.py")
    assert of_processor.filename == "processor.py"

# SPDX-License-Identifier: Apache-2.0
"""What processor and model log: at start-up, and once the first item was seen."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anchorprune_vllm.log import logger
from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel
from tests.support.dialects import in_dialect, prompt_of
from tests.support.pictures import picture


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """Those of our logger; in one process, vLLM would drop the second of two equal lines."""
    for name, log in (("info", logging.Logger.info), ("warning", logging.Logger.warning)):
        every_time = partial(log, stacklevel=3)
        monkeypatch.setattr(f"vllm.logger._print_{name}_once", partial(_call, every_time))
    seen: list[logging.LogRecord] = []
    monkeypatch.setattr(logger, "handle", seen.append)
    return seen


def _call(log: Any, *args: Any) -> None:
    log(*args)


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(
    ("arch", "method"),
    [
        ("llava-1.5", "anchorprune"),
        ("qwen2.5-vl", "anchorprune"),
        ("llava-next", "hiprune"),
        ("qwen2.5-vl", "hiprune"),
        ("llava-onevision", "cdpruner"),
        ("llava-video", "cdpruner"),
    ],
)
def test_both_say_the_same_and_where(
    demo_models: Any, records: list[logging.LogRecord], arch: str, method: str
) -> None:
    loaded = LocalModel(demo_models(arch), settings={"method": method})
    prompt = in_dialect(prompt_of("Why?"), loaded.processor.info.get_tokenizer())
    loaded.process(prompt, picture(1), budget=16)
    of_model, of_processor = (r for r in records if "AnchorPrune is active" in r.getMessage())
    assert of_model.getMessage() == of_processor.getMessage()
    assert f"method {method} keeps 16 visual tokens per item" in of_model.getMessage()
    is_none = of_model.getMessage().endswith("text encoder none")
    assert is_none == (method == "hiprune")
    assert of_model.filename in ("contrastive.py", "adapter.py")
    assert of_processor.filename == "processor.py"


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(
    ("arch", "words"),
    [
        ("qwen3-vl", "at the full level, as the family anchorprune_vllm.models.families.qwen:Qwen"),
        ("cohere2-vision", "at the full level, by an order of its vision tower that was found"),
        ("granite4-vision", "at the reduced level: it is not known which tokens"),
    ],
)
def test_the_level_is_logged_once_an_item_was_seen(
    tmp_path: Path, records: list[logging.LogRecord], arch: str, words: str
) -> None:
    make_demo_model(tmp_path / "model", arch=arch)
    loaded = LocalModel(tmp_path / "model", max_model_len=2048)
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}]
    prompt = loaded.processor.info.get_tokenizer().apply_chat_template(message, tokenize=False)
    for seed in (1, 2):
        loaded.embed(loaded.process(prompt, picture(seed), budget=4))
    (line,) = [r.getMessage() for r in records if " level" in r.getMessage()]
    assert words in line

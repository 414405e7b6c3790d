# SPDX-License-Identifier: Apache-2.0
"""The trained model that comes with the package: it answers, on the engine and pruned as well."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration
from vllm import LLM

from anchorprune_vllm.tools.demo_model import TRAINED, make_demo_model
from anchorprune_vllm.tools.eval_data import DataSet, load_data
from anchorprune_vllm.tools.eval_engine import ask
from anchorprune_vllm.tools.eval_plan import Configuration
from anchorprune_vllm.tools.eval_scores import is_right
from tests.support.engine import make_engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("demo") / TRAINED
    make_demo_model(model, arch=TRAINED)
    return model


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLM]:
    with make_engine(model, "100%") as llm:
        yield llm


@pytest.fixture(scope="module", params=["easy-vqa", "scenes"])
def data(request: pytest.FixtureRequest) -> DataSet:
    return load_data([request.param], 300)[0]


def answers(llm: LLM, data: DataSet, budget: str) -> list[str]:
    configuration = Configuration("anchorprune", None, "turn", budget)
    found, _ = ask(
        llm,
        data,
        configuration,
        prompt="{question}",
        max_tokens=4,
        add_special_tokens=False,
        advance=lambda count: None,
    )
    return found


def accuracy(data: DataSet, found: Sequence[str]) -> float:
    right = [is_right(a, q.answers) for a, q in zip(found, data.questions, strict=True)]
    return sum(right) / len(right)


@torch.inference_mode()
def test_unpruned_answers_are_those_of_transformers(
    engine: LLM, model: Path, data: DataSet
) -> None:
    processor = AutoProcessor.from_pretrained(model)
    llava = LlavaForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    few = DataSet(data.name, data.pictures[:4])
    expected = []
    for picture, question in zip(few.picture_of, few.questions, strict=True):
        chat = [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": question.text}],
            }
        ]
        inputs = processor(
            text=processor.apply_chat_template(chat, add_generation_prompt=True),
            images=few.pictures[picture].load(),
            return_tensors="pt",
            add_special_tokens=False,
        )
        written = llava.generate(**inputs, max_new_tokens=4, do_sample=False)
        new = written[0, inputs.input_ids.shape[1] :]
        expected.append(processor.decode(new, skip_special_tokens=True))
    assert [answer.strip() for answer in answers(engine, few, "100%")] == expected


def test_accuracy_is_as_published_and_falls_with_the_budget(
    engine: LLM, model: Path, data: DataSet
) -> None:
    published = json.loads((model / "scores.json").read_text())[data.name]
    shares = [accuracy(data, answers(engine, data, budget)) for budget in ("100%", "11.1%", "1")]
    assert shares[0] == pytest.approx(published["model"]["all"], abs=0.03)
    assert shares[0] > 0.95
    assert shares[0] > shares[1] > published["without the picture"]["all"] + 0.1
    assert shares[1] > shares[2] + 0.1

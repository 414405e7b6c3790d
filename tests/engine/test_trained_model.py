# SPDX-License-Identifier: Apache-2.0
"""The trained models that come with the package: they answer, on the engine and pruned as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
from vllm import LLM

from anchorprune_vllm.commands.eval.data import DataSet, blind_guesses, load_data
from anchorprune_vllm.commands.eval.engine import ask_all
from anchorprune_vllm.commands.eval.plan import PERFECT, Configuration
from anchorprune_vllm.commands.eval.scores import is_right
from anchorprune_vllm.testing.demo_models.make import TRAINED, make_trained_model
from tests.support.engine import make_engine

RIGHT_UNPRUNED = {"clutter": 0.95, "scenes": 0.95, "easy-vqa": 0.88}
"""Both models are better than this; docs/accuracy.md has their figures."""


@pytest.fixture(scope="module", params=TRAINED)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("demo") / f"trained-{arch}"
    make_trained_model(model, arch)
    return model


@pytest.fixture(scope="module")
def engine(arch: str, model: Path) -> Iterator[LLM]:
    with make_engine(model, "100%", settings=TRAINED[arch]) as llm:
        yield llm


@pytest.fixture(scope="module", params=RIGHT_UNPRUNED)
def data(request: pytest.FixtureRequest) -> DataSet:
    return load_data([request.param], 300)[0]


def answers(llm: LLM, data: DataSet, budget: str, method: str = "anchorprune") -> list[str]:
    found, _ = ask_all(
        llm,
        data,
        Configuration(method, None, "turn", budget),
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
    same = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    few = DataSet(data.name, data.pictures[:4])
    expected = []
    for picture, question in zip(few.picture_of, few.questions, strict=True):
        content = [{"type": "image"}, {"type": "text", "text": question.text}]
        inputs = processor(
            text=processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            ),
            images=few.pictures[picture].load(),
            return_tensors="pt",
            add_special_tokens=False,
        )
        written = same.generate(**inputs, max_new_tokens=4, do_sample=False)
        new = written[0, inputs.input_ids.shape[1] :]
        expected.append(processor.decode(new, skip_special_tokens=True).strip())
    assert [answer.strip() for answer in answers(engine, few, "100%")] == expected


def test_answers_are_right_and_fewer_with_a_small_budget(engine: LLM, data: DataSet) -> None:
    """A tenth of the tokens says far more than the question alone, and more than one token."""
    guesses = blind_guesses(data.name)
    blind = accuracy(data, [guesses.get(question.text, "") for question in data.questions])
    whole, tenth, one = (
        accuracy(data, answers(engine, data, budget)) for budget in ("100%", "11.1%", "1")
    )
    assert whole > RIGHT_UNPRUNED[data.name]
    assert whole > tenth - 0.02  # of 300 questions
    assert tenth > blind + 0.1
    assert tenth > one


def test_a_relevance_that_is_never_wrong_finds_more(tmp_path: Path) -> None:
    """Told where things are, a small budget answers what it did not.

    Of Qwen2.5-VL: the relevance of the small LLaVA leaves nothing to be told.
    """
    arch = "qwen2.5-vl"
    (data,) = load_data(["clutter"], 300)
    make_trained_model(tmp_path / "model", arch)
    right = []
    # An engine each: its caches know an image under its question, whatever else is told.
    for method in ("anchorprune", PERFECT):
        with make_engine(tmp_path / "model", "100%", settings=TRAINED[arch]) as llm:
            right.append(accuracy(data, answers(llm, data, "5.6%", method)))
    own, told = right
    assert told > own + 0.05

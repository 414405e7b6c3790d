# SPDX-License-Identifier: Apache-2.0
"""Families: hooks of the general adapter, and those that other packages bring."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from mistral_common.protocol.instruct.messages import (
    AssistantMessage,
    ImageChunk,
    TextChunk,
    UserMessage,
)
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from PIL import Image
from torch import Tensor
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.cache import MultiModalProcessorOnlyCache

import anchorprune_vllm
from anchorprune_vllm.models import families
from anchorprune_vllm.models.families.base import Family
from anchorprune_vllm.models.families.gemma4 import Gemma4
from anchorprune_vllm.models.general import tower_signals
from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, plans_of
from anchorprune_vllm.worker.embedding_payload import split_numbers
from tests.support.pictures import picture

PACKAGE = Path(__file__).parents[3] / "support" / "family_package"
COMMAND, GRANITE = "Cohere2VisionForConditionalGeneration", "Granite4VisionForConditionalGeneration"
IMAGE = picture(1, (300, 200))


@pytest.fixture(autouse=True)
def forget_packages() -> Iterator[None]:
    families._installed.cache_clear()
    yield
    families._installed.cache_clear()


def load(path: Path, arch: str) -> LocalModel:
    make_demo_model(path, arch=arch)
    return LocalModel(path, max_model_len=2048, limit_mm_per_prompt={"image": 2})


def process(model: LocalModel, budget: int | str) -> Any:
    content = [{"type": "image"}, {"type": "text", "text": "What color is the circle?"}]
    prompt = model.processor.info.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return model.process(prompt, IMAGE, budget=budget)


def test_a_family_of_another_package_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: None
) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    monkeypatch.setattr(tower_signals, "probe", None)  # what a family states is not found out
    model = load(tmp_path / "model", "cohere2-vision")
    processed = process(model, 12)
    (plan,) = plans_of(processed)
    assert plan.tokens.grids == ((4, 4),) * 7
    (rows,) = model.embed(processed)
    assert len(rows) == 12
    learned = model.model.tower_signals.order  # type: ignore[operator]
    assert learned == TowerOrder("unit", "none", "raster", 4)


def test_what_is_stated_is_what_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: None
) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    from tiled_vision import CommandVision

    monkeypatch.setattr(CommandVision, "tower_order", Family.tower_order)
    model = load(tmp_path / "model", "cohere2-vision")
    model.embed(process(model, 12))
    learned = model.model.tower_signals.order  # type: ignore[operator]
    assert learned == TowerOrder("unit", "none", "raster", 4)


def test_a_statement_that_does_not_fit_the_tower_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: None
) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    from tiled_vision import CommandVision

    wrong = TowerOrder("unit", "first", "raster", 4)
    monkeypatch.setattr(CommandVision, "tower_order", lambda self, ratio: wrong)
    model = load(tmp_path / "model", "cohere2-vision")
    model.embed(process(model, 12))
    learned = model.model.tower_signals.order  # type: ignore[operator]
    assert learned == TowerOrder("unit", "none", "raster", 4)


class WithNewlines(Family):
    """Granite 4 Vision: a base view of 4 x 4, and rows of a picture with a newline behind each."""

    base, columns = 16, 8

    @classmethod
    def units(cls, hf_config: Any, modality: str, item: Any, layout: PromptLayout) -> MediaTokens:
        rows = (layout.embeddings - cls.base) // (cls.columns + 1)
        sizes, widths = (cls.base, rows * cls.columns), (4, cls.columns)
        return MediaTokens(layout.embeddings, sizes, widths)

    @classmethod
    def candidates(cls, tokens: MediaTokens) -> Tensor:
        numbers = torch.arange(tokens.unpruned)
        is_newline = (numbers >= cls.base) & ((numbers - cls.base + 1) % (cls.columns + 1) == 0)
        return numbers[~is_newline]


@pytest.mark.parametrize("positions", ["compact", "native"])
def test_separators_are_no_candidates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: None, positions: str
) -> None:
    monkeypatch.setitem(families.FAMILIES, GRANITE, f"{__name__}:WithNewlines")
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(WithNewlines=WithNewlines))
    path = tmp_path / "model"
    make_demo_model(path, arch="granite4-vision")
    model = LocalModel(
        path,
        max_model_len=2048,
        limit_mm_per_prompt={"image": 2},
        settings={"positions": positions},
    )
    (whole,) = model.embed(process(model, "100%"))
    (plan,) = plans_of(process(model, "100%"))
    tokens = plan.tokens
    assert tokens.candidates < tokens.unpruned == len(whole)
    # A base view of 16, and then rows of 8 with a newline behind each.
    newlines = [*range(16 + 8, tokens.unpruned, 9)]
    assert tokens.candidates == tokens.unpruned - len(newlines)

    (rows,) = model.embed(process(model, tokens.candidates - 1))
    width = model.model.embedding_size
    kept = [int((whole[:, :width] == row).all(1).nonzero()[0]) for row in rows[:, :width]]
    assert len(kept) == tokens.candidates - 1
    assert kept == sorted(set(kept) - {*newlines})
    if positions == "native":
        at = split_numbers(rows, 3, 3)[1]
        assert at.tolist() == [[place] * 3 for place in kept]
    # All candidates are all rows: vLLM's own.
    (all_of_them,) = model.embed(process(model, tokens.candidates))
    assert torch.equal(all_of_them, whole)


def test_padding_of_gemma4_is_left_out() -> None:
    """Its tower gets all images of one padded length, and then those of the next."""
    images: Any = SimpleNamespace(_padded=[9, 4, 9])
    expected = [*range(5), 18, 19, 20, *range(9, 18)]
    assert Gemma4.unpadded(images, [5, 3, 9]).tolist() == expected


def test_each_image_of_an_expanded_prompt_has_its_own_question(tmp_path: Path, rank: None) -> None:
    """Pixtral's prompts arrive with all tokens of all images."""
    path = tmp_path / "model"
    make_demo_model(path, arch="pixtral")
    formats = ("tokenizer_mode", "config_format", "load_format")
    limits = {"image": 2}
    model = LocalModel(path, limit_mm_per_prompt=limits, **dict.fromkeys(formats, "mistral"))
    tokenizer = model.processor.info.get_tokenizer()
    questions = ["What color is the circle?", "How many squares are there?"]
    first, second = (
        UserMessage(content=[ImageChunk(image=IMAGE), TextChunk(text=question)])
        for question in questions
    )
    answer = AssistantMessage(content="red")
    for chat, asked in [([first], questions[:1]), ([first, answer, second], questions)]:
        request = ChatCompletionRequest(messages=chat)
        prompt = tokenizer.mistral.encode_chat_completion(request).tokens
        processed = model.process(prompt, *[IMAGE] * len(asked), budget=12)
        read = [plan.query_ids.flatten().tolist() for plan in plans_of(processed)]
        assert read == [tokenizer.encode(each, add_special_tokens=False) for each in asked]
        image_id = model.processor.info.get_hf_processor().image_token_id
        assert processed["prompt_token_ids"].count(image_id) == 12 * len(asked)


def start(path: Path, **settings: Any) -> Any:
    anchorprune_vllm.register()
    overrides = {"anchorprune": settings} if settings else {}
    return EngineArgs(model=str(path), hf_overrides=overrides).create_model_config()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_module:Family", "does not import (ModuleNotFoundError: No module named"),
        ("own_vision:Absent", "does not import (AttributeError: "),
        ("own_vision:number", "is 7; it must be a subclass of anchorprune_vllm.models.families"),
        ("own_vision:Other", "it must be a subclass of anchorprune_vllm.models.families.base"),
    ],
)
def test_a_family_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, words: str
) -> None:
    module: Any = ModuleType("own_vision")
    module.number, module.Other = 7, type("Other", (), {})
    monkeypatch.setitem(sys.modules, "own_vision", module)
    points = [EntryPoint(COMMAND, value, families.ENTRY_POINTS)]
    monkeypatch.setattr(families, "entry_points", lambda group: points)
    make_demo_model(tmp_path / "model", arch="cohere2-vision")
    with pytest.raises(ValueError, match=r"^anchorprune: the family ") as refused:
        start(tmp_path / "model", budget=8)
    message = str(refused.value)
    assert words in message
    assert f"of {COMMAND} (entry point group anchorprune.families)" in message
    assert "leave out --anchorprune-budget" in message
    assert "\n" not in message
    start(tmp_path / "model")  # without a budget nothing asks for it


def test_ours_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, GRANITE, f"{Family.__module__}:Family")
    points = [EntryPoint(GRANITE, "own_vision:Absent", families.ENTRY_POINTS)]
    monkeypatch.setattr(families, "entry_points", lambda group: points)
    assert families.family_of(GRANITE) is Family


def test_a_cached_image_with_another_number_keeps_its_plan(rank: None, tmp_path: Path) -> None:
    """MiniCPM writes an image's number into its text, anew for an image from the cache."""
    make_demo_model(tmp_path / "model", arch="minicpm-v-4.6")
    model = LocalModel(tmp_path / "model", max_model_len=2048, limit_mm_per_prompt={"image": 2})
    cache = MultiModalProcessorOnlyCache(model.processor.info.ctx.model_config)
    tokenizer = model.processor.info.get_tokenizer()

    def processed(*images: Image.Image, cached: bool) -> Any:
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": "What is it?"}]
        return model.processor(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            ),
            model.processor.info.parse_mm_data({"image": list(images)}),
            hf_processor_mm_kwargs={"anchorprune": {"budget": 12}},
            cache=cache if cached else None,
        )

    first, second = picture(1, (300, 200)), picture(2, (200, 300))
    processed(second, cached=True)
    mixed = processed(first, second, cached=True)
    fresh = processed(first, second, cached=False)
    assert mixed["prompt_token_ids"] == fresh["prompt_token_ids"]
    places = [
        [
            (place.offset, place.length, place.get_num_embeds())
            for place in each["mm_placeholders"]["image"]
        ]
        for each in (mixed, fresh)
    ]
    assert places[0] == places[1]
    assert [count for _, _, count in places[0]] == [12, 12]

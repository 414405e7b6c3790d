# SPDX-License-Identifier: Apache-2.0
"""Signals that only some methods need: as in transformers, for every model, image and video."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from anchorprune_vllm.methods import registry
from anchorprune_vllm.methods.controls import uniform_grid
from anchorprune_vllm.models.llava import clip as clip_tower
from anchorprune_vllm.models.llava import siglip as siglip_tower
from anchorprune_vllm.selection import Candidates, KeptTokens
from anchorprune_vllm.signals.contrastive import ContrastivePair
from anchorprune_vllm.signals.word_matching import WordMatching
from anchorprune_vllm.testing.local_model import LocalModel
from anchorprune_vllm.testing.selections import recorded_selections
from anchorprune_vllm.worker import tower_taps
from tests.support.dialects import in_dialect, prompt_of
from tests.support.models import with_videos
from tests.support.pictures import clip, picture
from tests.support.reference import Reference


@registry.method("importance", "features", "projected", "keys", "object_attention")
def everything(item: Candidates) -> KeptTokens:
    return uniform_grid(item)


@pytest.fixture(scope="module")
def model(any_model: Path, rank: None) -> Iterator[LocalModel]:
    """Pruned by a method that needs all there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._PUBLISHED, "everything", f"{__name__}:everything")
        yield LocalModel(
            any_model, settings={"method": "everything"}, limit_mm_per_prompt={"image": 3}
        )


def candidates_of(model: LocalModel, *media: Any) -> list[Candidates]:
    """What the method is given of each item."""
    images = sum(not isinstance(item, tuple) for item in media)
    prompt = in_dialect(
        prompt_of("What?", images, len(media) - images), model.processor.info.get_tokenizer()
    )
    with recorded_selections(model.model._pruner) as selections:
        model.embed(model.process(prompt, *media, budget=9))
    return [given for given, _ in selections]


def check(given: Candidates, reference: Reference, media: Any) -> None:
    with torch.inference_mode():
        keys, received = reference.method_signals(media)
        projected = reference.embed(media)
    torch.testing.assert_close(given.keys, keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        given.object_attention.double(), received.double(), atol=1e-6, rtol=1e-4
    )
    torch.testing.assert_close(given.projected, projected, atol=2e-5, rtol=2e-5)
    assert [rows * columns for rows, columns in given.grids if rows] == reference.unit_sizes(media)


def test_image(model: LocalModel, reference: Reference, subtests: pytest.Subtests) -> None:
    for size in ((168, 168), (333, 157), (60, 900)):
        with subtests.test(size=size):
            image = picture(1, size)
            (given,) = candidates_of(model, image)
            check(given, reference, image)


def test_images_together_and_from_the_cache(model: LocalModel, reference: Reference) -> None:
    images = [picture(seed, (168 + 40 * seed, 168)) for seed in (2, 3)]
    first = candidates_of(model, *images)
    with pytest.MonkeyPatch.context() as patch:  # the tower does not run again
        tower = getattr(model.model, "vision_tower", None) or model.model.visual
        patch.setattr(type(tower), "forward", None)
        again = candidates_of(model, images[1])
    for given, image in zip([*first, *again], [*images, images[1]], strict=True):
        check(given, reference, image)


def test_grids_turn_with_the_picture(model: LocalModel) -> None:
    wide, high = (candidates_of(model, picture(5, size))[0] for size in ((400, 150), (150, 400)))
    assert sorted((columns, rows) for rows, columns in high.grids) == sorted(wide.grids)
    is_square = model.config.model_config.architecture == "LlavaForConditionalGeneration"
    assert any(columns != rows for rows, columns in wide.grids) != is_square


@with_videos
def test_video(model: LocalModel, reference: Reference) -> None:
    video = clip(4, frames=5)
    (given,) = candidates_of(model, video)
    check(given, reference, video)
    assert len(given.grids) == len(reference.unit_sizes(video)) > 1


# --- Methods that need little ---


@pytest.fixture(scope="module")
def free_model(any_model: Path, rank: None) -> LocalModel:
    """Pruned by free selection: the first K tokens."""
    return LocalModel(any_model, settings={"method": "first"}, limit_mm_per_prompt={"image": 3})


def test_free_selection_computes_no_signals(
    free_model: LocalModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a signal was computed")

    # Where signals come from: the tower's attention, the pair's space, the question's words.
    for name in ("received_attention", "class_attention"):
        for module in (tower_taps, clip_tower, siglip_tower):
            monkeypatch.setattr(module, name, refuse, raising=False)
    monkeypatch.setattr(tower_taps, "query_and_key", refuse)
    monkeypatch.setattr(ContrastivePair, "__init__", refuse)
    monkeypatch.setattr(WordMatching, "_embed_words", refuse, raising=False)
    image = picture(1, (333, 157))
    (given,) = candidates_of(free_model, image)
    assert given.relevance is None
    assert given.importance.shape == (0,)
    tokens = sum(reference.unit_sizes(image))
    assert len(given.features) == tokens
    plain = reference.embed(image)
    with torch.inference_mode():
        prompt = in_dialect(prompt_of("What?", 1, 0), free_model.processor.info.get_tokenizer())
        (rows,) = free_model.embed(free_model.process(prompt, image, budget=9))
    torch.testing.assert_close(rows[:, : plain.shape[1]], plain[:9], atol=2e-5, rtol=2e-5)


def test_a_method_gets_what_it_needs_and_no_more(
    any_model: Path, rank: None, reference: Reference, subtests: pytest.Subtests
) -> None:
    for name in ("fastervlm", "divprune"):
        with subtests.test(name=name):
            model = LocalModel(any_model, settings={"method": name})
            image = picture(1, (168, 168))
            (given,) = candidates_of(model, image)
            tokens = sum(reference.unit_sizes(image))
            assert len(given.importance) == (tokens if name == "fastervlm" else 0)
            assert (given.projected is None) == (name == "fastervlm")
            assert given.relevance is None
            assert given.keys is given.object_attention is None


def test_methods_that_ask_nothing_need_no_text_encoder(
    demo_models: Any, rank: None, subtests: pytest.Subtests
) -> None:
    """The demo models' towers are paired with no published checkpoint."""
    for method, arch in product(["fastervlm", "uniform"], ["llava-1.5", "llava-onevision"]):
        with subtests.test(method=method, arch=arch):
            model = LocalModel(demo_models(arch), settings={"method": method, "text_encoder": None})
            prompt = in_dialect(prompt_of("What?"), model.processor.info.get_tokenizer())
            (rows,) = model.embed(model.process(prompt, picture(1), budget=9))
            assert len(rows) == 9

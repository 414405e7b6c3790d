# SPDX-License-Identifier: Apache-2.0
"""LLaVA-OneVision in vLLM's own classes, without an engine."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from anchorprune_vllm.commands.bench.towers import edit_json
from anchorprune_vllm.models.llava import llava_onevision
from anchorprune_vllm.models.llava.frames import unpruned_index_between_newlines
from anchorprune_vllm.plan import pop_plans
from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, plans_of
from tests.support.dialects import in_dialect, prompt_of
from tests.support.pictures import QUESTIONS, clip, picture
from tests.support.reference import Reference, reference_of


@pytest.fixture(scope="module")
def reference(demo_models: Any) -> Reference:
    return reference_of(demo_models("llava-onevision"))


@pytest.fixture(scope="module")
def model(demo_models: Any, rank: None) -> LocalModel:
    return LocalModel(demo_models("llava-onevision"))


def process(model: LocalModel, *media: Any, budget: int | str) -> Any:
    videos = sum(isinstance(item, tuple) for item in media)
    prompt = prompt_of(QUESTIONS[0], len(media) - videos, videos)
    prompt = in_dialect(prompt, model.processor.info.get_tokenizer())
    return model.process(prompt, *media, budget=budget)


def placeholders(processed: Any) -> list[int]:
    return [place.length for places in processed["mm_placeholders"].values() for place in places]


def test_300_sizes_and_budgets_have_a_row_for_each_placeholder(rank: None, tmp_path: Path) -> None:
    make_demo_model(tmp_path / "model", arch="llava-onevision", image_size=42)  # 3 x 3 patches
    model = LocalModel(tmp_path / "model")
    rng = random.Random(0)
    largest = model.processor.info.get_max_image_tokens()
    is_scaled = {}
    for batch in range(100):
        processed = []
        for number in range(3):
            size = int(10 ** rng.uniform(0, 2.6)), int(10 ** rng.uniform(0, 2.6))
            budget = rng.choice([1, rng.randrange(1, 90), f"{rng.randrange(1, 101)}%"])
            image = picture(3 * batch + number, size)
            processed.append(process(model, image, budget=budget))
            (plan,) = plans_of(processed[-1])
            assert plan.tokens.unpruned <= largest
            tiles = len(processed[-1]["mm_kwargs"]["image"][0]["pixel_values"].data)
            is_scaled[tiles > 1 + 9] = plan.keeps_all
        rows = [len(item) for item in model.embed(*processed)]
        assert [[count] for count in rows] == [placeholders(item) for item in processed]
    assert is_scaled.keys() == {False, True}


def test_videos_have_a_row_for_each_placeholder(
    model: LocalModel, subtests: pytest.Subtests
) -> None:
    for budget, frames in product([1, 16, "30%", "100%"], [1, 2, 5, 17]):
        with subtests.test(budget=budget, frames=frames):
            processed = process(model, clip(1, frames=frames, size=(90, 60)), budget=budget)
            assert [len(rows) for rows in model.embed(processed)] == placeholders(processed)


def test_a_picture_larger_than_vllm_thinks_possible(model: LocalModel, reference: Any) -> None:
    """Unpruned it has more tokens than the size that vLLM measures with."""
    image = picture(1, (372, 834))
    assert reference.unpruned(image) == 1764
    assert model.processor.info.get_max_image_tokens() >= 1764


def test_an_image_beside_a_larger_one(model: LocalModel) -> None:
    """The HF processor would fill it up with empty tiles."""
    small, large = picture(1), picture(2, (500, 336))
    expected = model.embed(*(process(model, image, budget=20) for image in (small, large)))
    model.model._pruner.forget_media()
    tiles: list[int] = []
    handle = model.model.vision_tower.register_forward_pre_hook(
        lambda module, args: tiles.append(len(args[0]))
    )
    both = process(model, small, large, budget=20)
    assert [len(item["pixel_values"].data) for item in both["mm_kwargs"]["image"]] == [2, 7]
    rows = model.embed(both)
    handle.remove()
    assert tiles == [2 + 7]
    for given, wanted in zip(rows, expected, strict=True):
        torch.testing.assert_close(given, wanted)


def test_rows_and_places_of_the_reference(
    model: LocalModel, reference: Any, subtests: pytest.Subtests
) -> None:
    for media in (picture(3), picture(4, (900, 700)), picture(5, (30, 800)), clip(6, frames=4)):
        with subtests.test(media=media):
            processed = process(model, media, budget=100)
            (rows,) = model.embed(processed)
            kept = reference.kept(media, QUESTIONS[0], 100)
            with torch.inference_mode():
                expected = reference.embed(media)[kept]
                whole = reference.embed_unpruned(media)
            torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
            (unpruned,) = model.embed(process(model, media, budget="100%"))
            torch.testing.assert_close(unpruned, whole, rtol=1e-4, atol=1e-4)


def test_places_of_the_reference(demo_models: Any, rank: None, subtests: pytest.Subtests) -> None:
    """Native positions of all candidates, relative to where the item begins."""
    for arch, media in (
        ("llava-onevision", picture(3)),
        ("llava-onevision", picture(4, (900, 700))),
        ("llava-onevision", picture(5, (1700, 9))),
        ("llava-onevision", clip(6, frames=4)),
        ("llava-video", picture(4, (900, 700))),
        ("llava-video", clip(6, frames=4)),
    ):
        with subtests.test(arch=arch, media=media):
            model = LocalModel(demo_models(arch), settings={"positions": "native"})
            reference: Any = reference_of(demo_models(arch))
            processed = process(model, media, budget=10)
            ((modality, kwargs),) = model.batches(processed)
            (plan,) = pop_plans(modality, kwargs)
            positions = model.model._media(modality, kwargs, []).positions(0, plan)
            assert positions.relative[:, 0].tolist() == reference._places_of(media)
            assert plan.tokens.unpruned == reference.unpruned(media)


def test_newlines_between_tokens() -> None:
    assert unpruned_index_between_newlines(5, None).tolist() == [0, 1, 2, 3, 4]
    assert unpruned_index_between_newlines(6, 2).tolist() == [0, 1, 3, 4, 6, 7]


def test_a_long_video_is_encoded_in_parts(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = clip(7, frames=9)
    (expected,) = model.embed(process(model, media, budget=50))
    calls: list[int] = []
    handle = model.model.vision_tower.register_forward_pre_hook(
        lambda module, args: calls.append(len(args[0]))
    )
    model.model._pruner.forget_media()
    monkeypatch.setattr(llava_onevision, "_PROFILED_FRAMES", 2)
    monkeypatch.setattr(model.model, "_max_encoder_tokens", 4 * 36 + 35)
    (rows,) = model.embed(process(model, media, budget=50))
    handle.remove()
    assert calls == [4, 4, 1]
    torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("arch", ["llava-onevision", "llava-video"])
def test_a_tower_whose_patches_do_not_fill_the_tile(rank: None, tmp_path: Path, arch: str) -> None:
    """As 27 x 27 patches of 14 pixels do not fill 384: here 7 x 7 in 108."""
    path = tmp_path / "model"
    make_demo_model(path, arch=arch, image_size=98)
    grids = [[108 * rows, 108 * columns] for rows in (1, 2) for columns in (1, 2)]
    for file in ("config.json", "siglip/config.json"):
        edit_json(path / file, vision_config={"image_size": 108})
    edit_json(path / "config.json", image_grid_pinpoints=grids)
    if arch == "llava-onevision":
        for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
            edit_json(path / file, size={"height": 108, "width": 108})
        edit_json(path / "preprocessor_config.json", image_grid_pinpoints=grids)
    model, reference = LocalModel(path), reference_of(path)
    for media in (picture(1, (200, 150)), picture(2, (1, 900)), clip(3, frames=3)):
        for budget in (1, 11):
            (rows,) = model.embed(process(model, media, budget=budget))
            with torch.inference_mode():
                expected = reference.embed(media)[reference.kept(media, QUESTIONS[0], budget)]
            torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
        (rows,) = model.embed(process(model, media, budget="100%"))
        torch.testing.assert_close(rows, reference.embed_unpruned(media), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(demo_models: Any, model: LocalModel, dtype: str) -> None:
    half = LocalModel(demo_models("llava-onevision"), dtype=dtype)
    for media in (picture(8, (336, 200)), clip(9, frames=3)):
        (rows,) = half.embed(process(half, media, budget=64))
        (exact,) = model.embed(process(model, media, budget=64))
        assert rows.dtype == getattr(torch, dtype)
        # The same tokens, but for near-ties.
        distance = torch.cdist(rows.float(), exact).amin(1) / exact.norm(dim=1).mean()
        assert (distance < 0.05).float().mean() > 0.8

# SPDX-License-Identifier: Apache-2.0
"""What `anchorprune explain` shows of every model: the right pixels, and what was selected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from anchorprune_vllm.commands.explain.explanation import Explanation, View
from anchorprune_vllm.commands.explain.look import load, look
from anchorprune_vllm.commands.explain.media import Asked, read_asked
from anchorprune_vllm.commands.explain.views import view_of
from anchorprune_vllm.plan import pop_plans
from anchorprune_vllm.testing.local_model import LocalModel, plans_of
from anchorprune_vllm.testing.media import Media, as_data_url, write_clip
from tests.support.dialects import in_dialect, prompt_of
from tests.support.models import with_videos
from tests.support.pictures import clip, picture
from tests.support.reference import Reference

QUESTION = "Where is the dog?"


@pytest.fixture(scope="module")
def model(any_model: Path, rank: None) -> LocalModel:
    return load(str(any_model), {"method": "anchorprune"}, {})


def asked_about(image: Image.Image) -> Asked:
    return Asked("a.png", Media("picture", as_data_url(image)), QUESTION)


def call_of(model: LocalModel, media: Any) -> tuple[str, dict[str, Any], Any]:
    """Modality, arguments and plan of the model's call for one item."""
    is_video = isinstance(media, tuple)
    prompt = prompt_of("What?", images=not is_video, videos=is_video)
    processed = model.process(
        in_dialect(prompt, model.processor.info.get_tokenizer()), media, budget=9
    )
    ((modality, kwargs),) = model.batches(processed)
    return modality, kwargs, plans_of(processed, modality)[0]


def mean_colours(view: View) -> np.ndarray:
    """Of each token's box in a view: [N, 3]."""
    pixels = np.asarray(view.image, dtype=np.float64)
    boxes = np.array(view.tokens).round().astype(int)
    return np.array([pixels[t:b, left:r].mean(axis=(0, 1)) for left, t, r, b in boxes])


def colours_of_tokens(
    model: LocalModel, modality: str, kwargs: dict[str, Any], patch: pytest.MonkeyPatch
) -> np.ndarray:
    """What tokens would be, if the tower gave the mean colour of each patch: [N, 3].

    Everything behind the tower is the model's own: unpadding, merging and pooling.
    """
    vision = model.model.config.vision_config
    if hasattr(model.model, "visual"):  # Qwen: a token is made of patches in a row
        name = "pixel_values" if modality == "image" else "pixel_values_videos"
        rows = kwargs[name].double().unflatten(1, (3, vision.temporal_patch_size, -1))[:, :, 0]
        return rows.unflatten(0, (-1, vision.spatial_merge_size**2)).mean((1, 3)).numpy()
    original = model.model._image_pixels_to_features

    def means(tower: Any, pixels: Tensor) -> Tensor:
        given = original(tower, pixels)
        colours = F.avg_pool2d(pixels, vision.patch_size).flatten(2).transpose(1, 2)
        return F.pad(colours, (0, given.shape[-1] - 3))

    patch.setattr(model.model, "_image_pixels_to_features", means)
    with torch.inference_mode():
        plans = pop_plans(modality, kwargs)
        (features,) = model.model._media(modality, kwargs, plans).encode([0])
    processor = model.processor.info.get_hf_processor().image_processor
    colours = features.context[:, :3].double().numpy()
    return (colours * processor.image_std + processor.image_mean) * 255


@pytest.mark.parametrize("size", [(168, 168), (400, 150), (60, 900)])
def test_boxes_hold_the_pixels_of_their_tokens(
    model: LocalModel, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    modality, kwargs, plan = call_of(model, picture(1, size))
    view = view_of(model, modality, kwargs, plan.tokens)
    sizes = [len(unit.tokens) for unit in view.units]
    assert [n for n in sizes if n] == [n for n in plan.tokens.unit_sizes if n]
    expected = colours_of_tokens(model, modality, kwargs, monkeypatch)
    np.testing.assert_allclose(mean_colours(view), expected, atol=1)


@with_videos
def test_boxes_of_frames(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    modality, kwargs, plan = call_of(model, clip(4, frames=10))
    view = view_of(model, modality, kwargs, plan.tokens)
    expected = colours_of_tokens(model, modality, kwargs, monkeypatch)
    np.testing.assert_allclose(mean_colours(view), expected, atol=1)
    tops = [unit.box[1] for unit in view.units]
    assert tops == sorted(tops)
    assert len(view.units) == len(plan.tokens.unit_sizes) > 1


def test_the_picture_is_shown_as_it_was_given(model: LocalModel) -> None:
    """One that no processor has to scale: as the only view, or as what the crops make up."""
    tile = getattr(model.model.config.vision_config, "image_size", 336)
    crops = hasattr(model.model.config, "image_grid_pinpoints")
    given = picture(2, (2 * tile, 2 * tile) if crops else (tile, tile))
    modality, kwargs, plan = call_of(model, given)
    view = view_of(model, modality, kwargs, plan.tokens)
    pixels, shown = np.asarray(given, dtype=int), np.asarray(view.image, dtype=int)
    boxes = [[round(edge) for edge in unit.box] for unit in view.units[crops:]]
    columns = 1 if len(boxes) == 1 else 2
    for number, (left, top, right, bottom) in enumerate(boxes):
        row, column = divmod(number, columns)
        high, wide = bottom - top, right - left
        part = pixels[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
        assert abs(part - shown[top:bottom, left:right]).max() <= 1


@pytest.mark.parametrize("size", [(168, 168), (333, 157)])
def test_what_is_shown_was_selected(
    model: LocalModel, reference: Reference, size: tuple[int, int]
) -> None:
    image = picture(3, size)
    found = look(model, asked_about(image), "anchorprune", ["9", "40"])
    json = Explanation("m", "a.png", QUESTION, found.view, (found.method,)).to_json()
    (method,) = json["methods"]
    for panel, budget in zip(method["panels"], (9, 40), strict=True):
        assert list(panel["indices"]) == reference.kept(image, QUESTION, budget)
        check_anchors(panel, [len(unit["tokens"]) for unit in json["view"]["units"]])
    assert len(method["relevance"]) == len(method["importance"]) == sum(reference.unit_sizes(image))


def check_anchors(panel: dict[str, Any], unit_sizes: list[int]) -> None:
    """Sizes and ends of anchors agree with the tokens that are marked as the anchor."""
    marked = {i for i, is_in in zip(panel["indices"], panel["is_anchor"], strict=True) if is_in}
    assert sum(anchor["budget"] for anchor in panel["anchors"]) == len(panel["indices"])
    for anchor in panel["anchors"]:
        start = sum(unit_sizes[: anchor["unit"]])
        own = marked & set(range(start, start + unit_sizes[anchor["unit"]]))
        assert len(own) == anchor["size"]
        assert anchor["minimum"] <= anchor["size"] <= anchor["maximum"]
        assert set(anchor["novel"]) <= own
        if anchor["ended_by"] == "K_max":
            assert anchor["size"] == anchor["maximum"]
            assert len(anchor["novel"]) < 3
        else:
            assert len(anchor["novel"]) == 3


@with_videos
def test_a_video_file(model: LocalModel, tmp_path: Path) -> None:
    frames = [picture(seed, (336, 336)) for seed in range(8)]
    write_clip(tmp_path / "clip.mp4", frames, fps=4)
    asked = read_asked(str(tmp_path / "clip.mp4"), QUESTION)
    found = look(model, asked, "anchorprune", ["20"])
    (panel,) = found.method.panels
    assert len(panel.indices) == 20
    assert len(found.view.units) > 1
    assert sum(panel.is_anchor) == sum(anchor.size for anchor in panel.anchors) > 0


def test_a_budget_of_everything_is_refused(model: LocalModel) -> None:
    with pytest.raises(ValueError, match=r"a budget of 100% keeps all \d+ tokens of a.png"):
        look(model, asked_about(picture(1)), "anchorprune", ["100%"])


@pytest.mark.parametrize("any_model", ["llava-1.5"], indirect=True)
def test_a_video_for_a_model_of_pictures_is_refused(model: LocalModel) -> None:
    asked = Asked("clip.mp4", Media("clip", "data:video/mp4;base64,"), QUESTION)
    with pytest.raises(ValueError, match=r"clip.mp4 is a video; Llava.* takes image input"):
        look(model, asked, "anchorprune", ["9"])

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from anchorprune_vllm.commands.bench.command import _SHAPES
from anchorprune_vllm.commands.bench.shapes import (
    MODEL_SHAPES,
    MediaSize,
    describe_costs,
    scaled,
    sizes_of,
)
from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, one_rank, plans_of

SCALES = [0.02, 0.4, 1, 5]


def test_the_command_knows_all_of_them() -> None:
    """It names them without importing torch."""
    assert tuple(MODEL_SHAPES) == _SHAPES


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_parts_stand_in_the_proportion_of_the_7b_model(name: str, scale: float) -> None:
    shape = MODEL_SHAPES[name]
    language_model, tower, text_encoder = scaled(shape, scale)
    if scale > 0.1:  # a small one is as near as whole layers allow
        assert language_model.parameters == pytest.approx(105e6 * scale, rel=0.15)
    wanted = shape.language_model.parameters / shape.tower.parameters
    assert language_model.parameters / tower.parameters == pytest.approx(wanted, rel=0.03)
    if text_encoder is not None and scale > 0.1:
        wanted = shape.language_model.parameters / shape.text_encoder.parameters
        found = language_model.parameters / text_encoder.parameters
        assert found == pytest.approx(wanted, rel=0.03)
    assert language_model.hidden % 64 == tower.hidden % 32 == 0


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_checkpoints_have_these_sizes(name: str, tmp_path: Path) -> None:
    shape = MODEL_SHAPES[name]
    model = tmp_path / "model"
    make_demo_model(
        model, arch=shape.arch, image_size=shape.image_size, sizes=sizes_of(shape, 0.02)
    )
    matrices = {
        name: tensor.numel()
        for name, tensor in load_file(model / "model.safetensors").items()
        if tensor.ndim == 2
    }
    language_model, tower, _ = scaled(shape, 0.02)
    in_layers = [n for n in matrices if "model.layers." in n and "vision" not in n]
    assert sum(matrices[n] for n in in_layers) == language_model.parameters
    in_tower = [n for n in matrices if "encoder.layers." in n or "visual.blocks." in n]
    last = 0
    if shape.arch in ("llava-1.5", "llava-next"):  # in the file, and not used
        last = tower.parameters // tower.layers
    assert sum(matrices[n] for n in in_tower) == tower.parameters + last


PROMPTS = {
    "llava-1.5": "USER: <image>\nWhat? ASSISTANT:",
    "llava-next": "USER: <image>\nWhat? ASSISTANT:",
    "qwen2.5-vl": "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n",
    "llava-video": "<|im_start|>user\n<video>\nWhat?<|im_end|>\n<|im_start|>assistant\n",
}
CANDIDATES = {
    "llava-1.5": 576,
    "llava-next": 2880,
    "qwen2.5-vl": 36 * 36,
    "llava-video": 16 * 13 * 13,
}


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_media_have_as_many_tokens_as_the_real_ones(name: str, tmp_path: Path) -> None:
    shape, model = MODEL_SHAPES[name], tmp_path / "model"
    sizes = sizes_of(shape, 0.01)
    make_demo_model(model, arch=shape.arch, image_size=shape.image_size, sizes=sizes)
    size = (shape.media.height, shape.media.width, 3)
    media = Image.fromarray(np.zeros(size, np.uint8))
    if shape.media.frames > 1:
        media = np.zeros((shape.media.frames, *size), np.uint8)
    with one_rank(tmp_path):
        local = LocalModel(model)
        processed = local.process(PROMPTS[name], media, budget="11.1%")
    (plan,) = plans_of(processed, "video" if shape.media.frames > 1 else "image")
    assert plan.tokens.unpruned == shape.tokens
    assert plan.tokens.candidates == CANDIDATES[name]
    assert plan.kept == round(0.111 * CANDIDATES[name])


def test_the_arithmetic_is_told() -> None:
    seven, ours = describe_costs(MODEL_SHAPES["llava-next"], 0.3)
    assert seven.startswith("7B: language model 6,476.0 M x 2,928 visual tokens, vision tower 289")
    assert "37,923 and 1,669.9 GFLOP, 22.7 to 1" in seven
    assert seven.endswith("attention adds 12% to the language model's")
    assert ours.startswith("scale 0.3: language model 28.5 M x 2,928 visual tokens")
    assert ours.endswith("22.7 to 1; attention adds 63% to the language model's")


@pytest.mark.parametrize(
    ("text", "media"),
    [("640x480", MediaSize(640, 480)), ("320X240x16", MediaSize(320, 240, 16))],
)
def test_media(text: str, media: MediaSize) -> None:
    assert MediaSize.parse(text) == media
    assert MediaSize.parse(str(media)) == media


@pytest.mark.parametrize("text", ["", "640", "640x", "640x0", "1x2x3x4", "640x-3", "axb"])
def test_media_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, as 672x672"):
        MediaSize.parse(text)

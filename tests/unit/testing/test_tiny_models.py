# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints load like the hub's, and are the same each time."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig, AutoProcessor, BatchFeature

from anchorprune_vllm.testing.demo_models.make import describe, make_demo_model
from anchorprune_vllm.testing.tiny_models import TINY_MODELS

Models = Callable[[str], Path]

HUB_FORMAT = [name for name, tiny in TINY_MODELS.items() if tiny.file_format == "hub"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Name of a family → directory of its model, in a folder of that name."""

    @cache
    def make(family: str) -> Path:
        model = tmp_path_factory.mktemp(family) / "model"
        make_demo_model(model, arch=family)
        return model

    return make


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


def processed(model: Path, *images: Image.Image) -> BatchFeature:
    """What the processor makes of a chat's turn with these images."""
    processor = AutoProcessor.from_pretrained(model)
    content = [*[{"type": "image"}] * len(images), {"type": "text", "text": "What color is it?"}]
    has_template = processor if processor.chat_template else processor.tokenizer
    text = has_template.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith("What color is it?<|im_end|>\n<|im_start|>assistant\n")
    return processor(text=text, images=list(images), return_tensors="pt")


def visual_tokens(model: Path, *images: Image.Image) -> int:
    config = AutoConfig.from_pretrained(model)
    config = getattr(config, "thinker_config", config)
    names = ("image_token_id", "image_token_index")
    (token_id,) = {value for name in names if (value := getattr(config, name, None)) is not None}
    return (processed(model, *images)["input_ids"] == token_id).sum().item()


@pytest.mark.parametrize("family", HUB_FORMAT)
def test_config_names_the_architecture(family: str, models: Models) -> None:
    config = AutoConfig.from_pretrained(models(family))
    assert config.architectures == [TINY_MODELS[family].architecture]


@pytest.mark.parametrize("family", HUB_FORMAT)
def test_visual_tokens_are_as_declared(family: str, models: Models) -> None:
    small, large = TINY_MODELS[family].visual_tokens
    assert visual_tokens(models(family), noise(300, 200)) == small
    assert visual_tokens(models(family), noise(1200, 900)) == large
    assert 16 <= small <= large <= 400


@pytest.mark.parametrize("family", HUB_FORMAT)
def test_processor_takes_several_images(family: str, models: Models) -> None:
    if TINY_MODELS[family].max_images == 1:  # all that vLLM serves it with
        return
    both = visual_tokens(models(family), noise(300, 200), noise(200, 320))
    assert both > visual_tokens(models(family), noise(300, 200))


@pytest.mark.parametrize("family", TINY_MODELS)
def test_bytes_depend_on_the_seed_alone(family: str, models: Models, tmp_path: Path) -> None:
    TINY_MODELS[family].write(tmp_path / "same", seed=0)
    TINY_MODELS[family].write(tmp_path / "other", seed=1)
    one, same, other = (
        {path.name: path.read_bytes() for path in directory.iterdir()}
        for directory in (models(family), tmp_path / "same", tmp_path / "other")
    )
    assert set(one) == {*same, "demo_model.json"}
    assert {name for name in same if same[name] != one[name]} == set()
    (changed,) = [name for name in other if other[name] != one[name]]
    assert changed in ("model.safetensors", "consolidated.safetensors")


@pytest.mark.parametrize("family", TINY_MODELS)
def test_describe(family: str, models: Models) -> None:
    tiny, line = TINY_MODELS[family], describe(models(family))
    assert line.startswith(f"{tiny.architecture}: {tiny.visual_tokens[0]} visual ")
    flags = tiny.engine_arguments
    assert line.endswith(list(flags.values())[-1] if flags else "MB on disk")


def test_sizes_are_fixed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"arch is 'qwen3-vl': its sizes are fixed"):
        make_demo_model(tmp_path / "model", arch="qwen3-vl", image_size=28)
